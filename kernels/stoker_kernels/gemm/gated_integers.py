"""`integer_silu_mul` on Hopper: silu(gate) · up within the product with a four-bit weight that has their rows in turn.

Invariants: as of `integer_gemm.choose`; the result is rounded once, where two kernels round gate and up first.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.gemm import gated
from stoker_kernels.integer_gemm import choose, sm90_int4
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
    if not choose.takes_tokens(len(x)):
        return gated.linear_silu_mul(x, LinearWeight(choose.scratch(weight, x.dtype)))
    out = torch.empty((len(x), weight.out_features // 2), dtype=x.dtype, device=x.device)
    reason = sm90_int4.refusal(x, weight, None, out)
    if reason is not None:
        raise ValueError(f"integer_silu_mul of a weight in pairs: {reason}")
    if len(x):
        sm90_int4.multiply(x, weight, None, out, gated=True)
    return out
