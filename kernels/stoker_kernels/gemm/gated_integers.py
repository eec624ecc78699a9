"""`integer_silu_mul` on Hopper: silu(gate) · up within the product with a four-bit weight that has their rows in turn.

Invariants: as of `integer_gemm.choose`; the result is rounded once, where two kernels round gate and up first.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.activation import silu_and_mul
from stoker_kernels.gemm import gated, table, tiles
from stoker_kernels.gemm.op import linear
from stoker_kernels.gemm.small import Operands
from stoker_kernels.integer_gemm import scratch, silu_mul_pairs
from stoker_kernels.launch.pdl import plain_launches
from stoker_kernels.quant import IntegerWeight, LinearWeight


def own(x: Tensor, weight: IntegerWeight) -> Tensor:
    """One kernel for weights in pairs, of many tokens the dense one on a weight that was dequantized; else `split`.

    Raises ValueError where a weight in pairs meets operands that its kernels do not take.
    """
    if weight.layout != "pairs":
        product = gated.split(x, weight)
        assert isinstance(product, Tensor), "a float x gives floats"
        return product
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    found = silu_mul_pairs(x, weight)
    return found if found is not None else _dense(x, scratch(weight, x.dtype))


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    """With what the launch before writes: a product asks for its weight before it waits, so it is launched plainly."""
    (n, k), m = weight.shape, len(x)
    out = torch.empty((m, n // 2), dtype=x.dtype, device=x.device)
    tile, operands = table.gated_tile(False, n, k, m), Operands(x, weight, out)
    if tile is not None and tiles.refusal(tile, operands) is None:
        tiles.launch(tile, operands, pdl=False)
        return out
    with plain_launches():
        both = linear(x, LinearWeight(weight))
    return silu_and_mul(both, out=out)
