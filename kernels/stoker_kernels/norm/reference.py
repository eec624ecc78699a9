"""RMS norm and layer norm in plain PyTorch: oracle and CPU backend.

Invariants: the signatures are those of the public ops; arithmetic is fp32 with one rounding, at the end, to the dtype
of the result.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.quant import Quantized


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x`."""
    return deliver(rms(x, weight, eps), x.dtype, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`residual += x` in place, then the norm of the rounded sum."""
    residual.copy_(residual.float() + x.float())
    return deliver(rms(residual, weight, eps), x.dtype, out)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`rms_norm`, then one fp8 scale a token."""
    return Quantized.of(rms(x, weight, eps))


def add_rms_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`add_rms_norm`, then one fp8 scale a token."""
    residual.copy_(residual.float() + x.float())
    return Quantized.of(rms(residual, weight, eps))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Layer norm of `x`, or of `x + residual`, over the last dimension."""
    value = x.float() if residual is None else x.float() + residual.float()
    normed = functional.layer_norm(value, value.shape[-1:], weight.float(), bias.float(), eps)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the last dimension times `weight`, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
