"""`linear`: y = x · Wᵀ + bias for dense and FP8 weights.

Invariants: each row of the result depends on its own row of x alone; `out` may be given and is then
returned; nothing synchronises with the host, so every path can be captured in a CUDA graph.
Does not know: which layer it serves, nor how weights reached the device.
"""

from __future__ import annotations

import torch

from stoker_kernels import reference_gemm
from stoker_kernels.linear_weight import LinearWeight, WeightKind
from stoker_kernels.quant_types import Quantized

__all__ = ["LinearWeight", "Quantized", "WeightKind", "linear"]


def linear(
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x · weight.dataᵀ + bias.

    x:    [T, K] of the weight's dtype, or `Quantized([T, K] e4m3, [T, 1] fp32)` for FP8 weights.
          A float x against an FP8 weight is quantized per token first.
    bias: [N] or None. out: [T, N] or None (allocated; x's dtype, bfloat16 for a quantized x).
    Raises ValueError for shapes that do not fit.
    """
    data = x.data if isinstance(x, Quantized) else x
    if data.dim() != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(data.shape)}, the weight [N, K] = {tuple(weight.data.shape)}")
    if data.device.type == "cpu":
        return reference_gemm.linear(x, weight, bias=bias, out=out)
    if isinstance(x, torch.Tensor) and weight.kind == "dense":
        return _cublas_dense(x, weight.data, bias, out)
    return reference_gemm.linear(x, weight, bias=bias, out=out)


def _cublas_dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
