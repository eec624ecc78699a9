"""`linear` on SM 9.0 where a row's bits do not depend on the batch: one way to cut a weight, for any number of tokens.

A tile of the family `cluster` (`small.py`) with a K that two CTAs share at most: its cut depends on the weight alone,
and a sum of two parts has no order. More tokens than a tile takes are multiplied 128 at a time.
Invariants: every output is summed over the same k blocks, by wgmma steps of 32 bytes of K in their order, whatever the
token tile; what no tile takes is refused, for cuBLAS chooses by the number of tokens.
Does not know: which layer it serves.
"""

from __future__ import annotations

import functools

import torch

from stoker_kernels.gemm import small, table, tiles
from stoker_kernels.gemm.small import MAX_TOKENS, TOKEN_TILES, Operands, Tile
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import FP8, LinearWeight, Quantized, quantize_fp8

# Weights of so many rows have tiles enough for every SM with 128 rows a tile, which read x half as often.
MANY_ROWS = 16384
# Rows of 64: half an SM's shared memory, so that two CTAs are on it and tiles that do not come out even cost less.
WIDE, NARROW = "128x1k2", "64x1k2="
CHUNK_BYTES = 128


def supports(target: Target) -> str | None:
    """bf16 and e4m3 on SM 9.0, where the tiles are compiled."""
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype not in (torch.bfloat16, FP8):
        return "takes bfloat16, float8_e4m3fn"
    return cuda.missing_cubin(f"sm90_{'e4m3' if target.dtype == FP8 else 'bf16'}_gemm_cluster", "sm_90a")


def shape_refusal(n: int, k: int, dtype: torch.dtype) -> str | None:
    """None where an [n, k] weight of `dtype` is multiplied here, else why not."""
    chunk = CHUNK_BYTES // dtype.itemsize
    return f"K = {k} is not a multiple of {chunk}, or N = {n} not of 8" if k % chunk or n % 8 else None


@functools.cache
def tile_for(n: int, tokens: int) -> Tile:
    """The tile for up to `tokens` (one of TOKEN_TILES) with a weight of n rows: they differ in their tokens alone."""
    return table.parse(WIDE if n >= MANY_ROWS else NARROW, tokens)


def linear(
    x: torch.Tensor | Quantized, weight: LinearWeight, *, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """y = x · weightᵀ + bias, [T, N]; shapes as of `gemm.linear`.

    Raises ValueError for operands that no tile takes, and for scales by blocks.
    """
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    if weight.kind != "dense" and isinstance(x, torch.Tensor):
        x = quantize_fp8(x)
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    if weight.kind == "fp8_block":
        raise ValueError("a weight with a scale for each block has no batch-invariant product on a GPU")
    (n, _), m = weight.data.shape, data.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=data.device) if out is None else out
    _refuse_uneven_cuts(n, weight.data)
    for first in range(0, m, MAX_TOKENS):
        part = slice(first, min(first + MAX_TOKENS, m))
        of_part = None if scale is None else scale[part]
        operands = Operands(data[part], weight.data, y[part], bias, weight.scale, of_part)
        tile = tile_for(n, small.token_tile(part.stop - part.start))
        if not tiles.taken(tile, operands):
            raise ValueError(f"no batch-invariant product: {tiles.refusal(tile, operands)}")
    return y


def _refuse_uneven_cuts(n: int, weight: torch.Tensor) -> None:
    """A kernel that fits an SM fewer times than the others would cut the weight in another way."""
    cuts = {small.cut(small.fitted(tile_for(n, tokens), weight), weight) for tokens in TOKEN_TILES}
    if len(cuts) > 1:
        raise ValueError(f"the token tiles cut a weight {tuple(weight.shape)} in different ways: {cuts}")
