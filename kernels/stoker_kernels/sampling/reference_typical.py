"""The typical set in plain PyTorch: the oracle of the tests and the CPU backend.

Invariants: the same integers as the kernel's, so the same set. Knows nothing of tiles or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.sampling.reference import adjusted, exponents, weights_of
from stoker_kernels.sampling.state import SURPRISE_UNITS, WEIGHT_SHIFT, Param, SamplingState


def typical_mask(logits: Tensor, state: SamplingState, row_slots: Tensor, positions: Tensor, bitmask: Tensor) -> None:
    """As `typical.typical_mask` defines it."""
    for row in (row_slots >= 0).nonzero()[:, 0].tolist():
        params = state.params[int(row_slots[row])]
        floats = params.view(torch.float32)
        if float(floats[Param.TYPICAL_P]) >= 1.0 or float(floats[Param.TEMPERATURE]) <= 0.0:
            continue
        values = adjusted(logits[row : row + 1], state, row_slots[row : row + 1], positions[row : row + 1],
                          bitmask[row : row + 1])  # fmt: skip
        peak = values.amax(dim=-1)
        if peak > -torch.inf:
            kept = _typical(values, peak, floats[[Param.TEMPERATURE]], float(floats[Param.TYPICAL_P]))
            bitmask[row] = _words(kept, bitmask.shape[1])


def _typical(values: Tensor, peak: Tensor, temperature: Tensor, typical_p: float) -> Tensor:
    """Which tokens of `values [1, V]` are kept."""
    exponent = exponents(values, peak, temperature)
    weights = weights_of(exponent)[0]
    surprise = (exponent[0] * -float(SURPRISE_UNITS)).to(torch.int64)
    coarse = weights >> WEIGHT_SHIFT
    mean = int((coarse * surprise).sum()) // int(coarse.sum())
    distance = (surprise - mean).abs().masked_fill(weights == 0, torch.iinfo(torch.int64).max)
    target = max(int(torch.tensor(typical_p, dtype=torch.float32).double() * weights.sum().double()), 1)
    nearest, order = distance.sort()
    last = int((weights[order].cumsum(0) < target).sum())
    return (distance <= nearest[last]) & (weights > 0)


def _words(kept: Tensor, count: int) -> Tensor:
    """int32 words of a row; bit i of word w is token 32·w + i."""
    bits = torch.zeros(count * 32, dtype=torch.int64)
    bits[: len(kept)] = kept.to(torch.int64)
    words = (bits.view(count, 32) << torch.arange(32)).sum(dim=1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
