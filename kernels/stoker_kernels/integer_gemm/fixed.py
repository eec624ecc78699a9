"""`integer_linear` on a GPU where a row's bits do not depend on the batch: one cut of K, for any number of tokens.

Weights in fragments go through `fragment_gemm.multiply_invariant`; other weights have one Triton tile.
Invariants: a weight's columns are cut by its own shape and the GPU's SMs, and each part is summed in the order of its
columns by one instruction; parts are added in their order.
Does not know: which layer it serves, nor what is faster where any bits will do (`choose.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels import fragment_gemm
from stoker_kernels.integer_gemm import triton_integer
from stoker_kernels.quant import IntegerWeight

TOKENS = triton_integer.TOKEN_TILES[-1]


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias. Raises ValueError where a weight in fragments meets operands that its kernels do not take."""
    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if len(x) == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.layout == "rows":
        triton_integer.multiply(x, weight, bias, y, tokens=TOKENS)
        return y
    reason = fragment_gemm.refusal(x, weight, bias, y)
    if reason is not None:
        raise ValueError(f"integer_linear of a weight in fragments: {reason}")
    fragment_gemm.multiply_invariant(x, weight, bias, y)
    return y
