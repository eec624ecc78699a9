"""The step: schedule, execute, commit. One step ahead: a step is launched before the last one's tokens are read.

A step with constrained sequences is launched up to its logits. The tokens of the step before decide what it may sample,
so its masks are computed, and the rest of it launched, once they are read: while its forward pass runs.

Invariants: `add`, `abort` and `step` are called by one thread, one after the other. A failed step ends every
sequence that it may have touched; whether the loop can go on, the executor's exception tells.
Knows nothing of processes, sockets or text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.adapters import Adapters
from stoker_runtime.engine.constraints import Constraints
from stoker_runtime.engine.executor_protocol import Executor, Launched
from stoker_runtime.engine.sleep import Sleeper
from stoker_runtime.errors import EngineError, RequestError
from stoker_runtime.kvcache.journal import CacheJournal
from stoker_runtime.request import EngineStats, FinishReason, Request
from stoker_runtime.sampling.grammar import GrammarCompiler, build_tokenizer
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SNAPSHOT_PAGES = 2
"""Pages for whose states a prompt is cut in two."""

class StepLoop:
    """A scheduler and an executor, one step ahead of each other."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self.executor = executor
        self.journal = CacheJournal() if config.publishes_kv_events else None
        self.scheduler = Scheduler(scheduler_config(executor, config, self.journal))
        self.adapters = Adapters(self.scheduler, executor.adapters)
        self.sleeper = Sleeper(self.scheduler, executor.sleeper)
        self._constraints = Constraints(self.scheduler, GrammarCompiler(lambda: load_trie(executor, config)))
        self._launched: Launched | None = None
        self._step_seconds = 0.0
        self._batch_tokens = self._shared_steps = 0
        self._mark = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    @property
    def max_tokens(self) -> int:
        """The most tokens of one sequence."""
        return self.scheduler.config.max_tokens

    @property
    def max_queued(self) -> int:
        """Waiting requests beyond which more are refused."""
        return self.scheduler.config.max_queued

    def add(self, request: Request, *, client: int = 0, handle: int = 0) -> Sequence:
        """Queue a request; errors as `Scheduler.add`, and AsleepError asleep."""
        self.sleeper.require_awake()
        if request.pooling is not None:
            raise RequestError("This model generates text; it does not embed or score.")
        self.adapters.require(request.adapter)
        sequence = self.scheduler.add(request, client=client, handle=handle)
        self.adapters.add(sequence)
        if request.params.masked:
            self._constraints.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence at once; False when it had ended."""
        self._constraints.forget(sequence)
        return self.scheduler.abort(sequence)

    def cut_short(self, sequence: Sequence, output: StepOutput) -> None:
        """End a sequence at once, as part of `output`."""
        self._constraints.forget(sequence)
        self.scheduler.end(sequence, FinishReason.ABORT, output)

    def step(self) -> StepOutput:
        """Launch the next step, then take in the one before. Raises what the executor raises."""
        batch = self.scheduler.schedule()
        launched = self.executor.execute(batch) if batch is not None else None
        finished, self._launched = self._launched, launched
        output = self._commit(finished) if finished is not None else StepOutput()
        self._constraints.enforce(output, launched)
        if self.adapters.busy:
            self.adapters.take_over(output, idle=launched is None and not output.sequences)
        self._measure(launched, finished)
        return output

    def _commit(self, finished: Launched) -> StepOutput:
        result = finished.result()
        self._shared_steps += result.shared
        return self.scheduler.commit(finished.batch, result)

    def fail(self, error: BaseException) -> list[Sequence]:
        """After `step` raised: end what it touched, and return it."""
        self._launched = None
        reason = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        failed = self.scheduler.fail(f"The engine failed in a step: {reason}")
        for sequence in failed:
            self._constraints.forget(sequence)
        return failed

    def stats(self) -> EngineStats:
        """Gauges of now and counters since start."""
        stats = self.scheduler.stats()
        stats.step_seconds, stats.batch_tokens = self._step_seconds, self._batch_tokens
        stats.shared_prefix_steps = self._shared_steps
        slots = self.scheduler.adapters
        stats.running_adapters, stats.waiting_adapters = map(self.adapters.names, (slots.running, slots.waiting))
        self.sleeper.count(stats)
        return stats

    def _measure(self, launched: Launched | None, finished: Launched | None) -> None:
        # With a step ahead, a step takes from one commit to the next; the first of a burst from its launch.
        now = time.perf_counter()
        if finished is not None:
            self._step_seconds = now - self._mark
            self._batch_tokens = finished.batch.num_tokens
            if launched is not None and self.scheduler.speculation is not None:
                self.scheduler.speculation.spent(launched.batch, finished.batch, self._step_seconds)
        if finished is not None or launched is not None:
            self._mark = now


def load_trie(executor: Executor, config: EngineConfig) -> LLTokenizer:
    """The model's tokens as grammars need them. Raises ModelError when the model has no tokenizer."""
    from stoker_runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(config.tokenizer or config.model)
    return build_tokenizer(tokenizer, executor.vocab_size, reachable_ends(executor))


def reachable_ends(executor: Executor) -> tuple[int, ...]:
    """The ids that end a text, but for those that the model cannot write."""
    return tuple(token for token in executor.eos_token_ids if 0 <= token < executor.vocab_size)


def scheduler_config(executor: Executor, config: EngineConfig, journal: CacheJournal | None = None) -> SchedulerConfig:
    """The scheduler's sizes: the executor's, which are decided, and the rules of the configuration."""
    return SchedulerConfig(
        num_pages=executor.num_pages,
        host_pages=executor.host_pages,
        host_page_tokens=executor.host_page_tokens,
        host_states=executor.host_states,
        host_state_tokens=executor.host_state_tokens,
        page_size=executor.page_size,
        adapter_slots=executor.adapters.slots if executor.adapters is not None else 0,
        max_num_seqs=executor.max_num_seqs,
        max_model_len=executor.max_model_len,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        vocab_size=executor.vocab_size,
        eos_token_ids=reachable_ends(executor),
        policy=config.scheduling_policy,
        max_queued=config.max_queued,
        prefix_caching=config.enable_prefix_caching and (not executor.keeps_states or executor.snapshots > 0),
        shares_prompts=not executor.keeps_states,
        snapshots=executor.snapshots,
        sees=executor.sees,
        whole_images=executor.whole_images,
        snapshot_tokens=SNAPSHOT_PAGES * executor.page_size,
        sight=executor.sight,
        seed=config.seed,
        journal=journal,
        drafts=executor.drafting.tokens if executor.drafting else 0,
        verify_tokens=executor.verify_tokens,
        draft_costs=executor.draft_costs,
        draft_batch_limit=executor.drafting.batch_limit if executor.drafting else 0,
    )
