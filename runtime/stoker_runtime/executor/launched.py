"""A step on its way through the device, and what the host reads of it in the end.

Invariants: `result()` is called once per step, in launch order, for one with `masks` after `sample()`; everything it
reads was copied before `event`.
Knows nothing of how the step was run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stoker_kernels.drafts import HEADER
from stoker_runtime.sampling.logprobs import PendingLogprobs, PendingPromptLogprobs
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import MaskRows, StepResult


@dataclass(slots=True)
class Launched:
    """One launched batch. `tokens` is pinned host memory by row; `rows` are those of `batch.sampled_slots`.

    With `drafts` a row of `tokens` is one of `accept_drafts`: how many tokens, how many drafts there were, the tokens.
    """

    batch: Batch
    tokens: torch.Tensor
    rows: list[int]
    event: torch.cuda.Event | None = None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: list[PendingPromptLogprobs] = field(default_factory=list)
    masks: MaskRows | None = None
    choose: Callable[[], None] | None = None
    drafts: int = 0
    shared: bool = False
    """A prefix that all rows have in common was attended once."""

    def sample(self) -> None:
        """Launch what waited for the masks."""
        assert self.choose is not None, "only a step with constrained rows waits"
        self.choose()
        self.choose = None

    def result(self) -> StepResult:
        """Wait for the tokens; they come in `batch.sampled_slots` order."""
        if self.event is not None:
            self.event.synchronize()
        if self.drafts:
            return self._runs()
        by_row: list[int] = self.tokens.tolist()
        tokens = [by_row[row] for row in self.rows]
        if self.logprobs is None and not self.prompt_logprobs:
            return StepResult(tokens=tokens, shared=self.shared)
        logprobs = None
        if self.logprobs is not None:
            scored = self.logprobs.by_index()
            logprobs = [scored.get(index) for index in range(len(tokens))]
        prompt = [pending.values() for pending in self.prompt_logprobs]
        return StepResult(tokens, logprobs, prompt, shared=self.shared)

    def _runs(self) -> StepResult:
        """The tokens of a step with drafts: each slot's, one after the other."""
        rows = self.tokens[: len(self.rows)].tolist()
        counts = [row[0] for row in rows]
        tokens = [token for row in rows for token in row[HEADER : HEADER + row[0]]]
        logprobs = None
        if self.logprobs is not None:
            scored = self.logprobs.by_index()
            width = self.drafts + 1
            logprobs = [scored.get(index * width + at) for index, count in enumerate(counts) for at in range(count)]
        return StepResult(tokens, logprobs, counts=counts, offered=[row[1] for row in rows])
