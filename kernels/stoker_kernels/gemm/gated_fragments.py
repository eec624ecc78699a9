"""`integer_silu_mul` and `fp4_silu_mul` on Hopper: silu(gate) · up within the product with a weight in fragments that
has their rows in turn.

Invariants: as of `fragment_gemm`; the result is rounded once, where two kernels round gate and up first.
Does not know: which layer it serves.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels import fragment_gemm
from stoker_kernels.gemm import gated
from stoker_kernels.launch.pdl import plain_launches
from stoker_kernels.quant import Fp4Weight, IntegerWeight, LinearWeight


def own(x: Tensor, weight: IntegerWeight | Fp4Weight) -> Tensor:
    """One kernel for weights in pairs, of many tokens the dense one on a weight that was dequantized; else `split`.

    Raises ValueError where a weight in pairs meets operands that its kernels do not take.
    """
    if weight.layout != "pairs":
        product = gated.split(x, weight)
        assert isinstance(product, Tensor), "a float x gives floats"
        return product
    if isinstance(weight, IntegerWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
    found = fragment_gemm.silu_mul_pairs(x, weight)
    if found is not None:
        return found
    dense = LinearWeight(fragment_gemm.dense(weight))
    with plain_launches():  # a product asks for its weight before it waits, and this one is only being written
        return gated.linear_silu_mul(x, dense)
