"""RMS norm on a CPU in one call of torch, which computes in fp32 and rounds once.

Invariants: fp32 accumulation, one rounding to the result's dtype; the residual is rounded before it is normed.
Knows nothing of dispatch.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from stoker_kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x [T,H]`."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps, out=out)
    normed = functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return normed if out is None else out.copy_(normed)


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
    """`residual += x` in place, then the norm of the rounded sum. A norm of x itself is left to the reference."""
    if post is not None:
        return reference.add_rms_norm(x, residual, weight, eps, post=post, multiplier=multiplier, out=out)
    # A sum of two numbers of 16 bits is computed in fp32 and rounded once, as the op says.
    return rms_norm(residual.add_(x, alpha=multiplier), weight, eps, out=out)


def add_normed(x: Tensor, residual: Tensor, post: Tensor, eps: float) -> None:
    """`residual += rms_norm(x)` in place."""
    reference.add_normed(x, residual, post, eps)


def rms_norm_columns(x: Tensor, weights: tuple[Tensor, ...], eps: float) -> None:
    """Spans of columns in place, each by its own norm."""
    reference.rms_norm_columns(x, weights, eps)
