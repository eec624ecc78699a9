"""`linear` and `linear_silu_mul` on SM 9.0 where a row's bits do not depend on the batch: one order of sums a weight.

Its K is cut into `parts_of` parts, whose sums are added from the first to the last, which depends on its shape alone.
Any tile that keeps this order may multiply: those of few tokens (`small.py`), whose parts are CTAs of a cluster,
and those of many (`wide.py`), which add part after part. Gate and up are one part, and in bf16 joined with their
activation for any number of tokens.
Invariants: every output is summed over the same k blocks, by wgmma steps of 32 bytes of K in their order, whatever the
tile; what no tile takes is refused, for cuBLAS chooses by the number of tokens.
Does not know: which layer it serves.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from stoker_kernels.activation import silu_and_mul, silu_and_mul_quant
from stoker_kernels.gemm import table, tiles
from stoker_kernels.gemm.small import GROUP_ROWS, MAX_TOKENS, RESIDENT, Operands, Tile, stem_of, token_tile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import FP8, LinearWeight, Quantized, quantize_fp8

CHUNK_BYTES = 128
FAMILIES = ("cluster", "multicast", "fixed")
MOST_PARTS = 4
# Up to STREAMED tokens bytes of the weight are all that counts; from SHARED_FROM on a tile without parts shares x.
STREAMED, SHARED_FROM = 32, 64
SMS = RESIDENT[0]  # of the card that the rules were found on: on any other they give the same bits
# A K so long gives parts to sum in turn that take longer than twice those that are summed at once.
LONG, AT_ONCE = 128, 2 * MAX_TOKENS


def supports(target: Target) -> str | None:
    """bf16 and e4m3 on SM 9.0, where the tiles are compiled."""
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype not in (torch.bfloat16, FP8):
        return "takes bfloat16, float8_e4m3fn"
    kinds = FAMILIES if target.dtype == FP8 else (*FAMILIES, "gated")
    missing = (cuda.missing_cubin(stem_of(target.dtype, kind), "sm_90a") for kind in kinds)
    return next((reason for reason in missing if reason is not None), None)


def shape_refusal(n: int, k: int, dtype: torch.dtype) -> str | None:
    """None where an [n, k] weight of `dtype` is multiplied here, else why not."""
    chunk = CHUNK_BYTES // dtype.itemsize
    return f"K = {k} is not a multiple of {chunk}, or N = {n} not of 8" if k % chunk or n % 8 else None


def parts_of(n: int, k_blocks: int) -> int:
    """Parts of K of a weight of n rows and `k_blocks` · 128 bytes: what gives most SMs two CTAs, four at most."""
    clusters = -(-n // GROUP_ROWS)
    fitting = (parts for parts in range(MOST_PARTS, 1, -1) if clusters <= 2 * RESIDENT[parts - 1])
    return min(next(fitting, 1), k_blocks)


@functools.cache
def tile_for(n: int, k_blocks: int, fp8: bool, m: int) -> Tile | WideTile:
    """The tile for m tokens with a weight of n rows and `k_blocks` · 128 bytes."""
    parts = parts_of(n, k_blocks)
    if m > (MAX_TOKENS if parts > 1 else SHARED_FROM):
        return table.busiest_of(False, fp8, n, m, parts)
    tokens = token_tile(m)
    if tokens > STREAMED and parts > 1:
        at_once = -(-n // GROUP_ROWS) * parts <= SMS
        return table.parse(f"{GROUP_ROWS if at_once else 2 * GROUP_ROWS}x1m1k{parts}", tokens)
    tile = "128x1k1" if tokens > STREAMED and _doubled(n) else f"64x1k{parts}="
    return replace(table.parse(tile, tokens), fixed=True)


def _doubled(n: int) -> bool:
    """Whether tiles of 128 rows, which read x half as often as those of 64, leave no more SMs without work."""
    tiles = -(-n // (2 * GROUP_ROWS))
    return tiles > SMS and -(-tiles // SMS) * 2 <= -(-n // GROUP_ROWS // SMS)


@functools.cache
def gated_tile_for(n: int, m: int) -> Tile | WideTile:
    """The tile for m tokens with n rows of gate and up in bf16."""
    if m > SHARED_FROM:
        return table.busiest_of(True, False, n, m, 1)
    tokens = token_tile(m)
    tile = "64x1k1=" if tokens <= STREAMED else "128x1k1" if _doubled(n) else "64x1k1"
    return replace(table.parse(tile, tokens), gated=True, fixed=True)


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
    (n, k), m = weight.data.shape, data.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=data.device) if out is None else out
    k_blocks = -(-k * weight.data.element_size() // CHUNK_BYTES)
    step = MAX_TOKENS if m <= AT_ONCE and k_blocks >= LONG and parts_of(n, k_blocks) > 1 else max(m, 1)
    for first in range(0, m, step):
        part = slice(first, min(first + step, m))
        tile = tile_for(n, k_blocks, weight.data.dtype == FP8, part.stop - first)
        of_part = None if scale is None else scale[part]
        _run(tile, Operands(data[part], weight.data, y[part], bias, weight.scale, of_part))
    return y


def linear_silu_mul(x: torch.Tensor | Quantized, weight: LinearWeight) -> torch.Tensor | Quantized:
    """silu(x · gateᵀ) · (x · upᵀ); shapes as of `gemm.linear_silu_mul`. FP8 and odd widths: `linear` and an activation.

    Raises ValueError for operands that no tile takes, and for scales by blocks.
    """
    n = len(weight.data)
    if isinstance(x, Quantized):
        return silu_and_mul_quant(linear(x, weight, bias=None, out=None))
    if n % 16:
        return silu_and_mul(linear(x, weight, bias=None, out=None))
    out = x.new_empty((len(x), n // 2))
    if len(x):
        _run(gated_tile_for(n, len(x)), Operands(x, weight.data, out))
    return out


def _run(tile: Tile | WideTile, operands: Operands) -> None:
    if not tiles.taken(tile, operands):
        raise ValueError(f"no batch-invariant product: {tiles.refusal(tile, operands)}")
