"""The ops of encoders in plain PyTorch: oracle of the kernels' tests, and CPU backend.

Invariants: the signatures are those of the public ops; arithmetic is fp32 with one rounding, at the end, to the
dtype of the result.
Knows nothing of dispatch. Reads lengths on the host, which synchronises a GPU.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """Softmax attention within each sequence, one sequence after the other."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = starts.tolist()
    for start, end in itertools.pairwise(bounds):
        query, key, value = (each[start:end].float().transpose(0, 1) for each in (q, k, v))
        seen = functional.scaled_dot_product_attention(query, key, value, scale=scale)
        out[start:end] = seen.transpose(0, 1).to(out.dtype)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Layer norm of `x`, or of `x + residual`, over the last dimension."""
    value = x.float() if residual is None else x.float() + residual.float()
    normed = functional.layer_norm(value, value.shape[-1:], weight.float(), bias.float(), eps)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The exact (erf) gelu."""
    return _deliver(functional.gelu(x.float()), x, out)


def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu by its tanh approximation."""
    return _deliver(functional.gelu(x.float(), approximate="tanh"), x, out)


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x · sigmoid(x)`."""
    return _deliver(functional.silu(x.float()), x, out)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`max(x, 0)`."""
    return _deliver(functional.relu(x.float()), x, out)


def _deliver(value: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return value.to(x.dtype) if out is None else out.copy_(value)
