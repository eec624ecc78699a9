"""RMS norm on a CPU in one call of torch, which computes in fp32 and rounds once.

Invariants: fp32 accumulation, one rounding to the result's dtype; the residual is rounded before it is normed.
Knows nothing of dispatch.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x [T,H]`."""
    normed = functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return normed if out is None else out.copy_(normed)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`residual += x` in place, then the norm of the rounded sum."""
    # A sum of two numbers of 16 bits is computed in fp32 and rounded once, as the op says.
    return rms_norm(residual.add_(x), weight, eps, out=out)
