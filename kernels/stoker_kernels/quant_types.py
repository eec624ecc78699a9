"""Values that carry their quantization scales.

Invariants: a value is `data * scale`; `scale` is fp32.
Does not know: how the scales were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Quantized:
    """FP8 activations: data [T, K] e4m3, scale fp32 [T, 1] (per token) or [T, ⌈K/128⌉] (per group)."""

    data: torch.Tensor
    scale: torch.Tensor
