"""`integer_linear` on CUDA: our Hopper kernels for weights in fragments, Triton for every other weight.

Invariants: one call outside of a capture makes every later one of its shape capturable; what a call takes of memory
beyond its result is one weight in 16 bits, for as many tokens as `fragment_gemm.takes_tokens` says and in other layouts
for more than TRITON_TOKENS.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels import fragment_gemm
from stoker_kernels.quant import IntegerWeight

TRITON_TOKENS = 64


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias. Raises ValueError where a weight in fragments meets operands that its kernels do not take."""
    from stoker_kernels.integer_gemm import triton_integer

    m = x.shape[0]
    y = torch.empty((m, weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.layout != "rows":
        if fragment_gemm.multiplied(x, weight, bias, y, "integer_linear"):
            return y
    elif m <= TRITON_TOKENS:
        triton_integer.multiply(x, weight, bias, y)
        return y
    return fragment_gemm.by_dense(x, scratch(weight, x.dtype), bias, y)


def scratch(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in 16 bits, gate before up, columns in its own order."""
    from stoker_kernels.integer_gemm import triton_integer

    if weight.layout != "rows":
        return fragment_gemm.dense(weight)
    dense = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.data.device)
    triton_integer.dequantize(weight, dense)
    return dense
