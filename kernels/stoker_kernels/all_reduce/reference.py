"""Sums over ranks in plain PyTorch: the oracle of the kernels.

Invariants: words are added in the order of ranks in fp32 and rounded once; what follows begins with the rounded sum.
Knows nothing of where ranks are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import Quantized


def total(parts: Sequence[Tensor]) -> Tensor:
    """`[T,H]` of each rank → their sum, of their dtype."""
    wide = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        wide += part.float()
    return wide.to(parts[0].dtype)


def total_add_rms_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += sum` in place, then its norm."""
    return add_rms_norm(total(parts), residual, weight, eps)


def total_add_rms_norm_quant(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Quantized:
    """The same, quantized a token."""
    return add_rms_norm_quant(total(parts), residual, weight, eps)
