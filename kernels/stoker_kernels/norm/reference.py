"""RMS norm and layer norm in plain PyTorch: oracle and CPU backend.

Invariants: the signatures are those of the public ops; arithmetic is fp32 with one rounding, at the end, to the dtype
of the result.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.quant import FP8, Quantized


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x`."""
    return deliver(rms(x, weight, eps), x.dtype, out)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`residual += x` in place, scaled or normed, then the norm of the rounded sum."""
    join(x, residual, eps, post, multiplier)
    return deliver(rms(residual, weight, eps), x.dtype, out)


def add_normed(x: Tensor, residual: Tensor, post: Tensor, eps: float) -> None:
    """`residual += rms_norm(x)` in place."""
    join(x, residual, eps, post, 1.0)


def rms_norm_columns(x: Tensor, weights: tuple[Tensor, ...], eps: float) -> None:
    """Spans of columns in place, each by its own norm."""
    first = 0
    for weight in weights:
        span = x[:, first : first + len(weight)]
        span.copy_(rms(span, weight, eps))
        first += len(weight)


def join(x: Tensor, residual: Tensor, eps: float, post: Tensor | None, multiplier: float) -> None:
    """`residual += x` in place, scaled or normed."""
    update = x.float() if post is None else rms(x, post, eps)
    residual.copy_(residual.float() + (update if multiplier == 1.0 else update * multiplier))


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, into: torch.dtype = FP8) -> Quantized:
    """`rms_norm`, then one scale a token."""
    return Quantized.of(rms(x, weight, eps), into)


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    into: torch.dtype = FP8,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
) -> Quantized:
    """`add_rms_norm`, then one scale a token."""
    join(x, residual, eps, post, multiplier)
    return Quantized.of(rms(residual, weight, eps), into)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Layer norm of `x`, or of `x + residual`, over the last dimension."""
    value = x.float() if residual is None else x.float() + residual.float()
    return deliver(_layer(value, weight, bias, eps), x.dtype, out)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    also: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`residual += x + also` in place, then the layer norm of the rounded sum."""
    residual.copy_(residual.float() + (x.float() if also is None else x.float() + also.float()))
    return deliver(_layer(residual.float(), weight, bias, eps), x.dtype, out)


def _layer(value: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shift = None if bias is None else bias.float()
    return functional.layer_norm(value, value.shape[-1:], weight.float(), shift, eps)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the last dimension times `weight`, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group: int, gate_first: bool) -> Tensor:
    """The definition of `gated.gated_rms_norm`."""
    value, open_by = x.float(), functional.silu(gate.float())
    value = value * open_by if gate_first else value
    parts = value.unflatten(1, (-1, group))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    result = (normed * weight.float().view(-1, group)).flatten(1)
    return deliver(result if gate_first else result * open_by, x.dtype, None)


def mean_squares(x: Tensor, widths: Sequence[int], *, gate: Tensor | None = None) -> Tensor:
    """The definition of `parted.mean_squares`."""
    spans = _opened(x, gate)[:, : sum(widths)].split(list(widths), dim=1)
    return torch.stack([span.square().mean(1) for span in spans], dim=1)


def rms_norm_by(
    x: Tensor, weights: Sequence[Tensor], means: Tensor, eps: float, *, gate: Tensor | None = None
) -> Tensor:
    """The definition of `parted.rms_norm_by`."""
    widths = [len(weight) for weight in weights]
    spans = _opened(x, gate)[:, : sum(widths)].split(widths, dim=1)
    roots = torch.rsqrt(means + eps).split(1, dim=1)
    parts = zip(spans, weights, roots, strict=True)
    normed = torch.cat([span * root * weight.float() for span, weight, root in parts], dim=1).to(x.dtype)
    if gate is not None:
        return normed
    x[:, : sum(widths)] = normed
    return x


def _opened(x: Tensor, gate: Tensor | None) -> Tensor:
    return x.float() if gate is None else x.float() * functional.silu(gate.float())
