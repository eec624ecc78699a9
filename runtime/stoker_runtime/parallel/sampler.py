"""The sampler of one rank among several: the leader's chooses, the others' take what it chose, within the same step.

Invariants: every rank takes the same way through a step, because the modes follow from the slots' parameters, which
all know. A rank that does not lead never reads its logits.
Knows nothing of how tokens cross.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.sampling.sampler import Sampler


class RankSampler(Sampler):
    """Gives the leader's tokens on every rank."""

    def __init__(self, slots: int, vocab: int, device: torch.device, *, collectives: Collectives) -> None:
        super().__init__(slots, vocab, device)
        self._collectives = collectives

    def __call__(self, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """`Sampler`."""
        if self._collectives.place.leads:
            tokens = super().__call__(logits, row_slots, positions, mode)
        else:
            tokens = torch.empty(len(row_slots), dtype=torch.int32, device=row_slots.device)
        return self._collectives.share(tokens)
