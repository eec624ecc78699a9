"""Products with four-bit weights on Hopper: host side of csrc/sm90_int4_*.

Up to 16 tokens each warp streams the weight's fragments by itself; up to `MAX_TOKENS` tiles of tokens share them; beyond,
the weight is dequantized into scratch memory and multiplied as a dense one, which costs 2.5 bytes a weight once for all
tokens.

Invariants: a launch never synchronises and can be captured after one launch of its kind; sums are added in a fixed order,
so equal calls give equal bits.
Does not know: which layer it serves, nor how the weight came to be in fragments.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.integer_gemm.fragments import COLUMNS, ROWS
from stoker_kernels.launch import cuda
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import IntegerWeight

STEM, ARCH = "sm90_int4_gemm", "sm_90a"
MAX_SPLIT = 8  # CTAs of a portable cluster
WHOLE_ROW = 31  # a group_shift beyond every column
STAGES = 4  # of `many`'s ring of x


class Int4Arguments(ctypes.Structure):
    """Int4Arguments of csrc/int4_fragments.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "codes", "scale", "zero")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "ld_x", "ld_out", "group_shift", "split")),
    ]


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """One compiled kernel: up to `tokens` tokens a CTA, `rows` weight rows, `k_warps` blocks of columns at a time.

    `ctas` are resident on an SM. `shares_x`: x goes through shared memory, and several tiles of tokens may follow.
    """

    tokens: int
    rows: int
    k_warps: int
    threads: int
    ctas: int
    shares_x: bool

    @property
    def kernel_name(self) -> str:
        """The function's name in the cubin."""
        if not self.shares_x:
            return f"{STEM}_few_m{self.tokens}"
        return f"{STEM}_many_m{self.tokens}_r{self.rows // 32}_k{self.k_warps}_c{self.ctas}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the sums of every warp's columns, or the ring of x in the same place."""
        sums = self.k_warps * self.tokens * self.rows * 4
        return max(sums, STAGES * self.k_warps * self.tokens * 128) if self.shares_x else sums


def few(tokens: int) -> Int4Tile:
    """The kernel in which every warp is by itself."""
    return Int4Tile(tokens, ROWS, k_warps=8, threads=256, ctas=2, shares_x=False)


def many(tokens: int, row_warps: int, k_warps: int, ctas: int) -> Int4Tile:
    """The kernel in which warps share x."""
    return Int4Tile(tokens, row_warps * 32, k_warps, row_warps * k_warps * 32, ctas, shares_x=True)


# Every kernel of the cubin; the engine takes those of `tile_for`.
TILES = (
    few(8), few(16), many(32, 4, 2, 2), many(32, 2, 4, 2), many(64, 4, 2, 2), many(64, 4, 2, 1), many(64, 8, 1, 2),
    many(64, 8, 1, 1), many(128, 4, 2, 1), many(128, 8, 1, 1),
)  # fmt: skip
MAX_TOKENS = 256
_BY_TOKENS = (few(8), few(16), many(32, 4, 2, 2), many(64, 4, 2, 1), many(128, 4, 2, 1))


def tile_for(tokens: int) -> Int4Tile:
    """The kernel for so many tokens: the smallest that holds them, or the largest, several times."""
    return next((tile for tile in _BY_TOKENS if tokens <= tile.tokens), _BY_TOKENS[-1])


def split_for(tile: Int4Tile, tokens: int, n: int, k: int, sms: int) -> int:
    """How many CTAs share the columns: the fewest rounds of work, counting what starting and adding up cost."""
    tiles = -(-n // tile.rows) * -(-tokens // tile.tokens)
    steps = -(-k // (COLUMNS * tile.k_warps))
    return min(range(1, MAX_SPLIT + 1), key=lambda split: (_rounds(tiles * split, sms * tile.ctas, steps, split), split))


def _rounds(ctas: int, slots: int, steps: int, split: int) -> float:
    # Starting a CTA and adding its sums cost about as much as two steps, each further CTA of a cluster a little.
    return max(ctas / slots, 1.0) * (-(-steps // split) + 2 + 0.25 * split)


def refusal(x: Tensor, weight: IntegerWeight, bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels take these operands, else why not."""
    if weight.layout != "fragments":
        return "the weight is not in fragments"
    if {x.dtype, out.dtype, weight.scale.dtype, bias.dtype if bias is not None else x.dtype} != {torch.bfloat16}:
        return f"takes bfloat16 throughout, not {x.dtype}, {weight.scale.dtype}, {out.dtype}"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    if out.stride(0) % 4 or out.data_ptr() % 8:
        return "rows of the result have to start on multiples of 8 bytes"
    return None


def multiply(
    x: Tensor, weight: IntegerWeight, bias: Tensor | None, out: Tensor, tile: Int4Tile | None = None, split: int = 0
) -> None:
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts. Raises CubinMissing.

    `tile` and `split` (1 to 8) are chosen where they are not given.
    """
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    tile = tile or tile_for(m)
    split = split or split_for(tile, m, n, k, _sm_count(x.device))
    arguments = _arguments(weight, out, x=x, bias=bias, split=split)
    ctas = -(-n // tile.rows) * -(-m // tile.tokens) * split
    cuda.launch(_load(tile, x.device), ctas, [arguments], x.device, pdl=pdl_on(x.device), cluster=split)


def dequantize(weight: IntegerWeight, out: Tensor) -> None:
    """out [N, K] = the weight in bf16, columns in the weight's own order. Raises CubinMissing."""
    chosen = cuda.kernel(STEM, ARCH, "sm90_int4_dequantize", 0, 256, out.device.index or 0)
    blocks = (weight.out_features // ROWS) * (weight.in_features // COLUMNS)
    cuda.launch(chosen, -(-blocks // 8), [_arguments(weight, out)], out.device, pdl=pdl_on(out.device))


def _load(tile: Int4Tile, device: torch.device) -> cuda.Kernel:
    return cuda.kernel(STEM, ARCH, tile.kernel_name, tile.shared_bytes, tile.threads, device.index or 0)


def _arguments(
    weight: IntegerWeight, out: Tensor, *, x: Tensor | None = None, bias: Tensor | None = None, split: int = 1
) -> Int4Arguments:
    whole = weight.group >= weight.in_features
    return Int4Arguments(
        out.data_ptr(), _address(x), _address(bias), weight.data.data_ptr(), weight.scale.data_ptr(),
        _address(weight.zero), 0 if x is None else x.shape[0], weight.out_features, weight.in_features,
        0 if x is None else x.stride(0), out.stride(0), WHOLE_ROW if whole else (weight.group // 16).bit_length() - 1, split,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
