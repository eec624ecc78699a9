"""A scheduler without a device, for tests of single decisions."""

from __future__ import annotations

from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import StepResult

EOS = 99
TOKEN = 7


class Harness:
    """A scheduler whose device always samples `token`; every step ends with the integrity check."""

    def __init__(self, **sizes: object) -> None:
        given: dict[str, object] = {
            "num_pages": 16,
            "page_size": 4,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 16,
            "vocab_size": 100,
            "eos_token_ids": (EOS,),
        }
        self.now = 0.0
        self.scheduler = Scheduler(SchedulerConfig(**(given | sizes)), clock=lambda: self.now)  # type: ignore[arg-type]

    def add(self, prompt: int | tuple[int, ...], max_tokens: int = 8, **more: object) -> Sequence:
        tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        names = ("priority", "cache_salt", "arrival", "family", "adapter")
        outer = {name: more.pop(name) for name in names if name in more}
        params = SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]
        return self.scheduler.add(Request("r", tokens, params, **outer))  # type: ignore[arg-type]

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.scheduler.check()
        return batch

    def commit(self, batch: Batch, token: int = TOKEN) -> StepOutput:
        output = self.scheduler.commit(batch, StepResult([token] * len(batch.sampled_slots)))
        self.scheduler.check()
        return output

    def step(self, token: int = TOKEN) -> tuple[Batch, StepOutput]:
        """Schedule and commit at once: nothing in flight."""
        batch = self.schedule()
        return batch, self.commit(batch, token)

    def run(self) -> None:
        """To idle, one step ahead."""
        launched: Batch | None = None
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            if launched is not None:
                self.commit(launched)
            launched = batch
