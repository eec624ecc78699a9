"""`parts.py` in plain PyTorch: the oracle of the tests and the CPU backend.

Invariants: results equal those of the Triton kernels.
Knows nothing of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.sampling import op
from stoker_kernels.sampling.parts import PEAK_DIGITS, PEAKS_DTYPE
from stoker_kernels.sampling.reference import finite


def part_peaks(logits: Tensor, first: int, part: int, parts: int) -> Tensor:
    """As `parts.part_peaks` defines it."""
    best = op.argmax(logits).long()[:, None]
    words = torch.cat((_ordered(finite(logits.gather(1, best))), best.int() + first), dim=1)
    peaks = torch.zeros((len(logits), parts * PEAK_DIGITS), dtype=PEAKS_DTYPE, device=logits.device)
    peaks[:, part * PEAK_DIGITS : (part + 1) * PEAK_DIGITS] = words.view(torch.uint8)
    return peaks


def best_peak(peaks: Tensor) -> Tensor:
    """As `parts.best_peak` defines it."""
    words = peaks.to(torch.uint8).view(torch.int32).view(len(peaks), peaks.shape[1] // PEAK_DIGITS, 2)
    orders, ids = words.unbind(dim=2)
    highest = orders.long() * 2**32 - ids
    return ids.gather(1, highest.argmax(dim=1, keepdim=True))[:, 0]


def _ordered(values: Tensor) -> Tensor:
    """fp32 → int32 in the same order, where zeros of either sign are one."""
    bits = values.masked_fill(values == 0.0, 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
