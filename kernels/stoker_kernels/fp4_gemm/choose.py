"""`fp4_linear` on CUDA: our Hopper kernels for weights in fragments, Triton for every other weight; many tokens take
dequantization and cuBLAS.

Invariants: one call outside of a capture makes every later one of its shape capturable; what a call takes of memory
beyond its result is one weight in 16 bits, for as many tokens as `fragment_gemm.takes_tokens` says and of rows for more
than FUSED_TOKENS.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels import fragment_gemm
from stoker_kernels.quant import Fp4Weight

FUSED_TOKENS = 64


def fp4_linear(x: Tensor, weight: Fp4Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias. Raises ValueError where a weight in fragments meets operands that its kernels do not take."""
    from stoker_kernels.fp4_gemm import triton_fp4

    m = x.shape[0]
    y = torch.empty((m, weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if weight.layout != "rows":
        if fragment_gemm.multiplied(x, weight, bias, y, "fp4_linear"):
            return y
    elif m <= FUSED_TOKENS:
        triton_fp4.multiply(x, weight, bias, y)
        return y
    return fragment_gemm.by_dense(x, scratch(weight, x.dtype), bias, y)


def scratch(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in 16 bits, gate before up."""
    from stoker_kernels.fp4_gemm import triton_fp4

    if weight.layout != "rows":
        return fragment_gemm.dense(weight)
    dense = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.data.device)
    triton_fp4.dequantize(weight, dense)
    return dense
