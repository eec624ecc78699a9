"""Bidirectional attention in plain PyTorch: oracle and CPU backend.

Invariants: the signature is that of the public op; arithmetic is fp32 with one rounding, at the end.
Knows nothing of dispatch. Reads lengths on the host, which synchronises a GPU.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax attention within each sequence, one sequence after the other."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = starts.tolist()
    for start, end in itertools.pairwise(bounds):
        query, key, value = (each[start:end].float().transpose(0, 1) for each in (q, k, v))
        near = None if window is None else _near(end - start, window, q.device)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=near, scale=scale)
        out[start:end] = seen.transpose(0, 1).to(out.dtype)
    return out


def _near(length: int, window: int, device: torch.device) -> Tensor | None:
    """Which tokens of a sequence see which: `[length, length]`; None where all see all."""
    if length <= window + 1:
        return None
    at = torch.arange(length, device=device)
    return (at[:, None] - at).abs() <= window
