"""Products of up to 16 tokens with GGUF's planes on Hopper: host side of csrc/sm90_blocks_few.cu.

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
TOKENS = (8, 16)  # of the kernels of a format
UNIT_ROWS, WARPS, CHUNK_TILES = 16, 8, 8
# Bytes that each of two CTAs of an SM can have, so that those of the next launch fill their rings beside ours; or one.
SHARED_OF_TWO, SHARED_LIMIT = 113 * 1024, 227 * 1024


class BlockArguments(ctypes.Structure):
    """BlockArguments of csrc/sm90_blocks_few.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "scale", "factor")),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "ld_x", "ld_out", "stages")),
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
    if x.shape[0] > TOKENS[-1]:
        return f"takes up to {TOKENS[-1]} tokens"
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


def shared_bytes(name: str, tokens: int, stages: int) -> int:
    """Dynamic shared memory: rings, barriers, sums of two tiles by every warp, and whole ones of a chunk."""
    sums = 4 * tokens * (2 * WARPS * (UNIT_ROWS + 4) + CHUNK_TILES * UNIT_ROWS)
    return 1024 + sums + WARPS * stages * (unit_bytes(name) + 8)


@functools.cache
def stages_of(name: str, tokens: int) -> int:
    """Units of each warp's ring: as many as let two CTAs share an SM."""
    each = shared_bytes(name, tokens, 1) - shared_bytes(name, tokens, 0)
    return max(2, (SHARED_OF_TWO - shared_bytes(name, tokens, 0)) // each)


def linear(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, *, stages: int = 0, ctas: int = 0) -> None:
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts; |x| below 2^63.

    Stages of a ring and CTAs are chosen where they are not given. Raises CubinMissing.
    """
    m, tiles = x.shape[0], piece.rows // UNIT_ROWS
    tokens = next(size for size in TOKENS if m <= size)
    stages = stages or stages_of(piece.format, tokens)
    shared = shared_bytes(piece.format, tokens, stages)
    name = f"{STEM}_{piece.format.lower()}_m{tokens}"
    chosen = cuda.kernel(STEM, ARCH, name, shared, 32 * WARPS, x.device.index or 0)
    low = cuda.tensor_map(piece.low, UNIT_ROWS)
    half = PLANE_KINDS[piece.format].high == 2  # its rows are of 64 bytes a step
    high = low if piece.high is None else cuda.tensor_map(piece.high, UNIT_ROWS, inner=64 if half else 128)
    arguments = BlockArguments(
        out.data_ptr(), x.data_ptr(), cuda.address_of(bias), piece.scale.data_ptr(), cuda.address_of(piece.factor),
        m, piece.rows, piece.columns // STEP, x.stride(0), out.stride(0), stages,
    )  # fmt: skip
    grid = min(tiles, ctas or sm_count(x.device))
    cuda.launch(chosen, grid, [low, high, arguments], x.device, pdl=pdl_on(x.device))
