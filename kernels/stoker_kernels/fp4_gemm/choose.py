"""`fp4_linear` on CUDA: a fused product for few tokens, dequantization and cuBLAS for many.

Invariants: one call outside of a capture makes every later one of its shape capturable; for more than FUSED_TOKENS
tokens a call takes the weight in x's dtype of memory beside its result.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.quant import Fp4Weight

FUSED_TOKENS = 64


def fp4_linear(x: Tensor, weight: Fp4Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    from stoker_kernels.fp4_gemm import triton_fp4

    m = x.shape[0]
    y = torch.empty((m, weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if m <= FUSED_TOKENS:
        triton_fp4.multiply(x, weight, bias, y)
        return y
    dense = torch.empty((weight.out_features, weight.in_features), dtype=x.dtype, device=x.device)
    triton_fp4.dequantize(weight, dense)
    if rehearsing():
        return y
    if bias is None:
        return torch.mm(x, dense.t(), out=y)
    return torch.addmm(bias, x, dense.t(), out=y)
