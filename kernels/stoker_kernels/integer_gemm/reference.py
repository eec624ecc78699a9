"""Products with integer weights in plain PyTorch: the oracle.

Invariants: the weight is dequantized to the dtype of x first, each step rounded, as its kernels do; the product is that
of the dtype. Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.fragment_gemm import from_fragments
from stoker_kernels.lane_gemm import from_lanes
from stoker_kernels.quant import IntegerWeight, unpack_rows, unpair_rows


def codes_of(weight: IntegerWeight) -> Tensor:
    """The codes uint8 [N, K] by stored rows, whatever the order of bytes."""
    if weight.layout == "rows":
        return unpack_rows(weight.data, weight.bits)
    if weight.layout == "lanes":
        return from_lanes(weight.data, weight.bits)
    return from_fragments(weight.data, weight.kind)


def dequantize_integers(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """`(code - zero) · scale` [N, K] in `dtype`, gate before up; columns in the weight's own order."""
    n, k = weight.out_features, weight.in_features
    codes = codes_of(weight).to(dtype)
    group = torch.arange(k, device=codes.device) // weight.group
    zero = weight.middle if weight.zero is None else weight.zero.to(dtype).t()[:, group]
    values = ((codes - zero) * weight.scale.to(dtype).t()[:, group]).view(n, k)
    return unpair_rows(values) if weight.layout == "pairs" else values


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = torch.nn.functional.linear(x, dequantize_integers(weight, x.dtype), bias)
    return y if out is None else out.copy_(y)
