"""Chooses the next token of each row on the device, from parameters that rest there by slot.

Invariants: greedy batches take the argmax path; which path a batch takes depends on its slots' parameters alone,
never on values on the device, so each path can be captured in a graph.
Knows nothing of text or stop conditions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker_runtime.scheduler.batch import SlotAssign

GREEDY = "greedy"
SAMPLE = "sample"


class Sampler:
    """Per-slot sampling parameters and the two ways through them: `greedy` and `sample`."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._plain = np.ones(slots, dtype=bool)
        self._logprobs: dict[int, int] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self.mode = GREEDY

    def assign(self, assigns: Sequence[SlotAssign]) -> None:
        """New sequences took these slots."""
        for assign in assigns:
            slot, params = assign.slot, assign.params
            self._plain[slot] = params.temperature == 0.0
            _put(self._logprobs, slot, params.logprobs)
            _put(self._prompt_logprobs, slot, params.prompt_logprobs)

    def logprob_slots(self, slots: Sequence[int]) -> list[int]:
        """Indices into `slots` of those that want log-probabilities of their sampled tokens."""
        if not self._logprobs:
            return []
        return [index for index, slot in enumerate(slots) if slot in self._logprobs]

    def logprobs(self, slot: int) -> int:
        """How many alternatives the sequence in `slot` wants beside its sampled token."""
        return self._logprobs[slot]

    def prompt_logprobs(self, slot: int) -> int:
        """The same for its prompt tokens; 0 where none are wanted."""
        return self._prompt_logprobs.get(slot, 0)

    def mode_of(self, slots: Sequence[int]) -> str:
        """The path a batch of these slots takes."""
        return GREEDY if bool(self._plain[list(slots)].all()) else SAMPLE

    def select(self, slots: Sequence[int]) -> None:
        """Remember the path for the following steps of unchanged membership."""
        self.mode = self.mode_of(slots)

    def __call__(self, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """Tokens `[R]` int32 for `logits [R, V]`; `positions [R]` is each row's last computed position."""
        return logits.argmax(dim=-1).to(torch.int32)


def _put(table: dict[int, int], slot: int, value: int | None) -> None:
    """Set or clear one slot's entry; slots are reused."""
    if value is None:
        table.pop(slot, None)
    else:
        table[slot] = value
