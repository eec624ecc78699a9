"""`integer_linear` on CUDA: our Hopper kernels for four bits in fragments, Triton for every other weight.

Invariants: one call outside of a capture makes every later one of its shape capturable; what a call takes of memory
beyond its result is one weight in 16 bits, for more than DENSE_FROM tokens and in other layouts for a few.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.integer_gemm import sm90_int4
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.quant import IntegerWeight

TRITON_TOKENS = 64
# From so many tokens on a weight in fragments is dequantized first (`bench --dense`, H200, µs of 1,024, 2,048 and 4,096
# tokens: 4608 × 3584 as it is 56, 117, 258, dequantized 54, 97, 191). Gate and up would have their activation apart
# then: 443, 892, 1,847 with it, and 470, 910, 1,782 with 27, 54, 108 for the activation.
DENSE_FROM, GATED_DENSE_FROM = 1536, 5632


def takes_tokens(m: int, *, gated: bool = False) -> bool:
    """Whether a weight in fragments is multiplied as it is by `m` tokens, or dequantized first."""
    return m < (GATED_DENSE_FROM if gated else DENSE_FROM)


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias. Raises ValueError where a weight in fragments meets operands that its kernels do not take."""
    from stoker_kernels.integer_gemm import triton_integer

    m = x.shape[0]
    y = torch.empty((m, weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.layout == "rows":
        if m <= TRITON_TOKENS:
            triton_integer.multiply(x, weight, bias, y)
            return y
        return _dense(x, scratch(weight, x.dtype), bias, y)
    reason = sm90_int4.refusal(x, weight, bias, y)
    if reason is not None:
        raise ValueError(f"integer_linear of a weight in fragments: {reason}")
    if takes_tokens(m):
        sm90_int4.multiply(x, weight, bias, y)
        return y
    return _dense(x, scratch(weight, x.dtype), bias, y)


def silu_mul_pairs(x: Tensor, weight: IntegerWeight) -> Tensor | None:
    """silu(x · gateᵀ) · (x · upᵀ) [M, N / 2] of a weight in pairs by one kernel; None: for so many tokens the weight is
    better dequantized, and multiplied as a dense one. Columns of x are in the order of the weight's.

    Raises ValueError where a weight in pairs meets operands that its kernels do not take.
    """
    if not takes_tokens(len(x), gated=True):
        return None
    out = torch.empty((len(x), weight.out_features // 2), dtype=x.dtype, device=x.device)
    reason = sm90_int4.refusal(x, weight, None, out)
    if reason is not None:
        raise ValueError(f"integer_silu_mul of a weight in pairs: {reason}")
    if len(x):
        sm90_int4.multiply(x, weight, None, out, gated=True)
    return out


def scratch(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in 16 bits, gate before up, columns in its own order."""
    from stoker_kernels.integer_gemm import triton_integer

    dense = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.data.device)
    (triton_integer if weight.layout == "rows" else sm90_int4).dequantize(weight, dense)
    return dense


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if rehearsing():
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def fragments_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where weights of `dtype` products on `device` should be laid out in fragments, else why not."""
    from stoker_kernels.launch.dispatch import sm_of

    return kernels_refusal(dtype, sm_of(device))


def kernels_refusal(dtype: torch.dtype, sm: int) -> str | None:
    """None where our Hopper kernels run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(sm90_int4.STEM, sm90_int4.ARCH)
