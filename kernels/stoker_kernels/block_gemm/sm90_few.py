"""Products of a few tokens with GGUF's planes on Hopper: host side of csrc/sm90_blocks_few.cu.

A launch has up to 32 tokens; more take several, which each read the weight.

Invariants: codes and scales are multiplied as their format defines them, exactly, and summed in fp32; sums are added in
a fixed order, so equal calls give equal bits. A launch never synchronises and can be captured after one of its kind; it
takes no memory beside its result.
Does not know: which layer it serves, nor which products come here (`plane_choose`).
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import PLANE_KINDS, STEP, PlaneRows, plane_row_bytes

STEM, ARCH = "sm90_blocks_few", "sm_90a"
FORMATS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1")
TOKENS = (8, 16, 32)  # of the kernels of a format
MOST_TOKENS = 64  # for which reading the weight anew is faster than what else there is
UNIT_ROWS, WARPS = 16, 8
# Tokens up to which two CTAs find room in an SM, so that the next launch's fill their rings beside ours; their bytes,
# and those of one alone.
PAIRED_TOKENS, SHARED_OF_TWO, SHARED_OF_ONE = 16, 113 * 1024, 227 * 1024


class BlockArguments(ctypes.Structure):
    """BlockArguments of csrc/sm90_blocks_few.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "low", "high", "scale", "factor")),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "ld_x", "ld_out")),
    ]


def device_refusal(dtype: torch.dtype, sm: int) -> str | None:
    """None where the kernels run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(STEM, ARCH)


def refusal(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels take these operands, else why not."""
    if piece.format not in FORMATS:
        return f"takes {', '.join(FORMATS)}, not {piece.format}"
    if x.shape[0] > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens"
    if piece.columns % STEP or piece.rows % UNIT_ROWS:
        return f"takes multiples of {UNIT_ROWS} rows and {STEP} columns"
    if {x.dtype, out.dtype, x.dtype if bias is None else bias.dtype} != {torch.bfloat16}:
        return "takes bfloat16 throughout"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    planes = (piece.low, piece.high, piece.scale, piece.factor)
    if any(cuda.address_of(tensor) % 16 for tensor in planes):
        return "planes have to start on multiples of 16 bytes"
    return device_refusal(x.dtype, sm_of(x.device))


def unit_bytes(name: str) -> int:
    """Bytes of 16 rows of a step."""
    kind = PLANE_KINDS[name]
    codes = sum(plane_row_bytes(bits, kind.words, STEP) for bits in (kind.low, kind.high) if bits)
    return UNIT_ROWS * (codes + 8 * kind.scale_words + (4 if kind.bytes_ else 0))


@functools.cache
def shared_bytes(name: str, tokens: int) -> int:
    """Dynamic shared memory: sums of two tiles by every warp, whole ones of a chunk, and as many units of each warp's
    ring as find room.
    """
    paired = tokens <= PAIRED_TOKENS
    sums = 4 * tokens * (2 * WARPS * (UNIT_ROWS + 4) + (8 if paired else 16) * UNIT_ROWS)
    units = WARPS * unit_bytes(name)
    return sums + ((SHARED_OF_TWO if paired else SHARED_OF_ONE) - sums) // units * units


def linear(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, *, ctas: int = 0) -> None:
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts; |x| below 2^63.

    CTAs, which share the rows, are as many as SMs where they are not given. Raises CubinMissing.
    """
    for first in range(0, len(x), TOKENS[-1]):
        own = slice(first, first + TOKENS[-1])
        _launch(x[own], piece, bias, out[own], ctas)


def _launch(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, ctas: int) -> None:
    m, tiles = x.shape[0], piece.rows // UNIT_ROWS
    tokens = next(size for size in TOKENS if m <= size)
    name = f"{STEM}_{piece.format.lower()}_m{tokens}"
    chosen = cuda.kernel(STEM, ARCH, name, shared_bytes(piece.format, tokens), 32 * WARPS, x.device.index or 0)
    arguments = BlockArguments(
        out.data_ptr(), x.data_ptr(), cuda.address_of(bias), piece.low.data_ptr(), cuda.address_of(piece.high),
        piece.scale.data_ptr(), cuda.address_of(piece.factor), m, piece.rows, piece.columns // STEP, x.stride(0),
        out.stride(0),
    )  # fmt: skip
    cuda.launch(chosen, min(tiles, ctas or sm_count(x.device)), [arguments], x.device, pdl=pdl_on(x.device))
