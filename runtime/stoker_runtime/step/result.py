"""What comes back of one step, and where the host writes what a step may sample.

Invariants: plain data on the host, no torch. Everything is ordered as the `Batch` that it belongs to.
Knows nothing of who runs steps, nor of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.request import TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """The outcome of one batch, on the host.

    `tokens`: one per entry of `batch.sampled_slots`, in that order. `logprobs`: in the same order, None for a
    slot whose parameters ask for none; None altogether when no sampled slot asks. `prompt_logprobs`: one list
    per chunk of `batch.prefills` (one entry per id in its `targets`); empty when no chunk has targets.
    Of a batch with drafts each slot has `counts[i]` ≥ 1 tokens, and log-probabilities, one after the other;
    `offered[i]` drafts were verified for it. `shared`: a prefix that all rows have in common was attended once.
    """

    tokens: list[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    counts: list[int] | None = None
    offered: list[int] = field(default_factory=list)
    shared: bool = False

    @property
    def rows(self) -> int:
        """Slots that got tokens."""
        return len(self.tokens) if self.counts is None else len(self.counts)


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Which tokens the rows of a batch may get: `words [R, ceil(V/32)]`, bit i of word w allowing token 32·w + i.

    `rows[i]` is the row of `batch.sampled_slots[i]`. All is allowed until something else is written.
    """

    words: NDArray[np.int32]
    rows: list[int]
