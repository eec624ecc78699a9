"""`integer_silu_mul` on Hopper: silu(gate) · up within the product with a four-bit weight that has their rows in turn.

Invariants: as of `integer_gemm.choose`; the result is rounded once, where two kernels round gate and up first.
Does not know: which layer it serves.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.gemm import gated
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
    if found is not None:
        return found
    dense = LinearWeight(scratch(weight, x.dtype))
    with plain_launches():  # a product asks for its weight before it waits, and this one is only being written
        return gated.linear_silu_mul(x, dense)
