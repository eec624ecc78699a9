"""`int8_product` and `int8_silu_mul` on SM 9.0: W8A8 in integers by the tiles of FP8, whose bytes it has.

A weight's tile is that of an e4m3 weight of its shape, or the nearest that is compiled for integers; where FP8 goes by
cuBLAS, our own tile next to it. Sums are exact, and every tile scales and rounds them in the order of
`int8_gemm/reference.py`: bits do not depend on the tile, so none is fixed for batch invariance.
Shapes and types that no tile takes go by `int8_gemm`.
Does not know: which layer it serves.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.activation import silu_and_mul_quant
from stoker_kernels.gemm import table, tiles
from stoker_kernels.gemm.small import MAX_TOKENS, Operands, stem_of
from stoker_kernels.gemm.spread import INTEGER_ROWS, SpreadTile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.wide import WideTile, of_integers
from stoker_kernels.int8_gemm import int8_linear
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import Int8Weight, Quantized, quantize_int8_rows

KINDS = ("cluster", "multicast", "spread", "wide")


def supports(target: Target) -> str | None:
    """bf16 activations on SM 9.0, where the tiles are compiled."""
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype != torch.bfloat16:
        return "takes bfloat16"
    missing = (cuda.missing_cubin(stem_of(torch.int8, kind), "sm_90a") for kind in KINDS)
    return next((reason for reason in missing if reason is not None), None)


@functools.cache
def tile_for(n: int, k: int, m: int) -> AnyTile:
    """The tile for m tokens with an [n, k] weight."""
    of_rule = compiled(table.rule_tile(True, n, k, m))
    if of_rule is not None:
        return of_rule
    if m <= MAX_TOKENS:
        return table.own_tile(True, n, k, m)
    widest = compiled(table.busiest_of(False, True, n, m, 0))
    assert widest is not None, "plain wide tiles of FP8 are compiled for integers, too"
    return widest


@functools.cache
def gated_tile_for(n: int, k: int, m: int) -> AnyTile | None:
    """The tile for silu(gate) · up of m tokens with an [n, k] weight of gate and up, None for two kernels."""
    return compiled(table.rule_gated(True, n, k, m))


def compiled(tile: AnyTile | None) -> AnyTile | None:
    """A tile of e4m3, or the next that has more rows, as it is compiled for integers; None where there is none."""
    if isinstance(tile, SpreadTile):
        rows = next((rows for rows in INTEGER_ROWS[tile.tokens] if rows >= tile.rows), None)
        nearest = None if rows is None else replace(tile, rows=rows)
        return nearest if nearest is not None and nearest.compiled else None
    if isinstance(tile, WideTile) and not of_integers(tile):
        return replace(tile, rows=tile.rows + 16)
    return tile


def linear(x: Tensor | Quantized, weight: Int8Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias, [T, N] of x's dtype, bfloat16 of a quantized x."""
    shape = (weight.out_features, weight.in_features)
    m = len(x.data) if isinstance(x, Quantized) else len(x)
    if m == 0:
        return split(x, weight, bias=bias, out=out)
    read = x if isinstance(x, Quantized) else Quantized(*quantize_int8_rows(x))
    y = torch.empty((m, shape[0]), dtype=torch.bfloat16, device=read.data.device) if out is None else out
    operands = Operands(read.data, weight.data, y, bias, weight.scale, read.scale)
    return y if tiles.taken(tile_for(*shape, m), operands) else int8_linear(read, weight, bias=bias, out=y)


def split(x: Tensor | Quantized, weight: Int8Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """The same on every device."""
    return int8_linear(x, weight, bias=bias, out=out)


def silu_mul(x: Quantized, weight: Int8Weight) -> Quantized:
    """silu(x · gateᵀ) · (x · upᵀ), [T, F], of a weight [2F, K]; by one kernel where there is a tile, then quantized."""
    m, (n, k) = len(x.data), weight.data.shape
    tile = gated_tile_for(n, k, m) if m else None
    if tile is not None:
        out = torch.empty((m, n // 2), dtype=torch.bfloat16, device=x.data.device)
        if tiles.taken(tile, Operands(x.data, weight.data, out, None, weight.scale, x.scale)):
            return Quantized(*quantize_int8_rows(out))
        del out
    return silu_and_mul_quant(linear(x, weight, bias=None, out=None), torch.int8)
