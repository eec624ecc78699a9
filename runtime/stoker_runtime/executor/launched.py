"""A step on its way through the device, and what the host reads of it in the end.

Invariants: `result()` is called once per step, in launch order; everything it reads was copied before `event`.
Knows nothing of how the step was run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stoker_runtime.engine.executor_protocol import StepResult
from stoker_runtime.sampling.logprobs import PendingLogprobs, PendingPromptLogprobs
from stoker_runtime.scheduler.batch import Batch


@dataclass(slots=True)
class Launched:
    """One launched batch. `picks` are the rows whose tokens count (None: all); `tokens` is pinned host memory."""

    batch: Batch
    tokens: torch.Tensor
    picks: list[int] | None
    event: torch.cuda.Event | None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: list[PendingPromptLogprobs] = field(default_factory=list)

    def result(self) -> StepResult:
        """Wait for the tokens; they come in `batch.sampled_slots` order."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens.tolist()
        picks = self.picks if self.picks is not None else range(len(tokens))
        if self.picks is not None:
            tokens = [tokens[row] for row in self.picks]
        if self.logprobs is None and not self.prompt_logprobs:
            return StepResult(tokens=tokens)
        by_row = self.logprobs.by_row() if self.logprobs is not None else {}
        return StepResult(
            tokens=tokens,
            logprobs=[by_row.get(row) for row in picks] if by_row else None,
            prompt_logprobs=[pending.values() for pending in self.prompt_logprobs],
        )
