"""The sampler of one rank among several: all choose together where all know what counts, else the leader's does, and
the others' take what it chose, within the same step.

    greedy    each rank's peaks of its columns, added up: every rank takes the highest
    sample    each rank samples its share of the rows, whose logits the others give it, and tells the tokens
    others    the leader samples: it alone has masks, and counts of what was sampled

Invariants: every rank takes the same way through a step, because the modes follow from the slots' parameters, which
all know. Tokens are those that one rank samples from all logits, and the same on all. Whole logits are the leader's.
Knows nothing of how anything crosses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.sampling import best_peak, part_peaks
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.sampling.modes import GREEDY
from stoker_runtime.sampling.sampler import Sampler


class RankSampler(Sampler):
    """Gives the same tokens on every rank."""

    def __init__(self, slots: int, vocab: int, device: torch.device, *, collectives: Collectives) -> None:
        super().__init__(slots, vocab, device)
        self._collectives = collectives

    def __call__(self, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """`Sampler`, by the leader."""
        if self._collectives.place.leads:
            tokens = super().__call__(logits, row_slots, positions, mode)
        else:
            tokens = torch.empty(len(row_slots), dtype=torch.int32, device=row_slots.device)
        return self._collectives.share(tokens)

    def of_part(self, own: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """`Sampler`, by all ranks of the last stage; `own [R, V / tensors]`."""
        exchange, place = self._collectives, self._collectives.place
        if place.tensors == 1:
            return self(own, row_slots, positions, mode)
        if not place.is_last:
            tokens = torch.empty(len(row_slots), dtype=torch.int32, device=row_slots.device)
        elif mode == GREEDY:
            first = place.rows(self._vocab).start
            tokens = best_peak(exchange.sum(part_peaks(own, first, place.tensor, place.tensors)))
        else:
            rows = place.dealt(len(own))
            mine = slice(rows.start, rows.stop)
            logits = exchange.deal(own, self._vocab)
            tokens = exchange.collect(super().__call__(logits, row_slots[mine], positions[mine], mode), len(own))
        return tokens if place.stages == 1 else exchange.share(tokens)
