"""The step of a model that pools: take whole texts off the queue, launch them, give their vectors.

    1. texts in the policy's order, as many as the step's tokens and rows allow; a text is never cut
    2. launch them; then read the step before, one step ahead as when generating
    3. cut and normalize each vector as its request asks

Invariants: `add`, `abort` and `step` are called by one thread. A text that passes `add` fits into a step alone, so it
never waits for ever. One that was aborted in flight gives nothing.
Knows nothing of processes, sockets, devices or text.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.executor_protocol import PoolingExecutor, PoolLaunched
from stoker_runtime.errors import EngineError, RequestError
from stoker_runtime.models.pooling import PoolingSpec, Task
from stoker_runtime.request import EngineStats, FinishReason, PoolingParams, Request
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.limits import refuse_impossible
from stoker_runtime.scheduler.policy import POLICIES, WaitingQueue
from stoker_runtime.scheduler.rate import AdmissionRate
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.pool_batch import PoolBatch, PoolRow

LEAST_NORM = 1e-12


@dataclass(slots=True)
class Flight:
    """Texts of one step; `launched` is None until the executor has taken it."""

    sequences: list[Sequence]
    tokens: int
    launched: PoolLaunched | None = None


class PoolingLoop:
    """A queue of texts and an executor, one step ahead of each other. The engine core drives it like a StepLoop."""

    def __init__(self, executor: PoolingExecutor, config: EngineConfig) -> None:
        self.executor = executor
        self.max_tokens = executor.max_model_len
        self.max_queued = config.max_queued
        self._order = POLICIES[config.scheduling_policy]
        self._waiting = WaitingQueue()
        self._flights: deque[Flight] = deque()
        self._admissions = AdmissionRate()
        self._serial = 0
        self._stats = EngineStats()
        self._mark = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._flights)

    def add(self, request: Request, *, client: int = 0, handle: int = 0) -> Sequence:
        """Queue a text. Raises RequestError for what this model cannot do, CapacityError when the queue is full."""
        executor = self.executor
        if request.pooling is None:
            raise RequestError("This model does not generate text.")
        refuse_impossible(request, max_tokens=self.max_tokens, vocab_size=executor.vocab_size)
        _check_pooling(request.pooling, executor.size, len(request.prompt_token_ids))
        self._admissions.require_room(len(self._waiting), self.max_queued, time.monotonic())
        length = len(request.prompt_token_ids)
        sequence = Sequence(request, limit=length, stops=frozenset(), seed=0, root=b"")
        sequence.client, sequence.handle = client, handle
        sequence.order = self._order(request, self._serial)
        self._serial += 1
        self._waiting.push(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """End a text at once; False when it had ended."""
        if sequence.finish is not None:
            return False
        sequence.finish = FinishReason.ABORT
        self._waiting.discard(sequence)
        return True

    def step(self) -> StepOutput:
        """Launch the next texts, then take in those before. Raises what the executor raises."""
        earlier, began = bool(self._flights), time.perf_counter()
        flight = self._draft()
        if flight is not None:
            # In the books before it is launched, so that `fail` finds its texts.
            self._flights.append(flight)
            rows = tuple(_row(sequence.request) for sequence in flight.sequences)
            flight.launched = self.executor.pool(PoolBatch(self._stats.steps, rows))
        output = self._take() if earlier else StepOutput()
        # With a step ahead, a step takes from one result to the next; the first of a burst from its launch.
        now = time.perf_counter()
        if earlier:
            self._stats.step_seconds = now - self._mark
        self._mark = now if earlier else began
        return output

    def fail(self, error: BaseException) -> list[Sequence]:
        """After `step` raised: end what was in flight, and return it."""
        reason = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        touched = [sequence for flight in self._flights for sequence in flight.sequences if sequence.finish is None]
        for sequence in touched:
            sequence.error = f"The engine failed in a step: {reason}"
            sequence.finish = FinishReason.ERROR
        self._flights.clear()
        return touched

    def stats(self) -> EngineStats:
        """Gauges of now and counters since start."""
        stats = self._stats
        stats.waiting = len(self._waiting)
        stats.running = sum(len(flight.sequences) for flight in self._flights)
        return stats

    def _draft(self) -> Flight | None:
        """The texts of the next step; None when nothing waits."""
        budget = self.executor.max_num_batched_tokens
        taken: list[Sequence] = []
        while len(taken) < self.executor.max_num_seqs and (sequence := self._waiting.pop()) is not None:
            if sequence.prompt_length > budget:
                self._waiting.push(sequence)
                break
            budget -= sequence.prompt_length
            sequence.admitted = time.monotonic()
            self._admissions.note(sequence.admitted)
            taken.append(sequence)
        if not taken:
            return None
        tokens = sum(sequence.prompt_length for sequence in taken)
        self._stats.steps += 1
        self._stats.prompt_tokens += tokens
        return Flight(taken, tokens)

    def _take(self) -> StepOutput:
        """Read the oldest flight. It stays in the books until it is read, so that `fail` finds it."""
        flight = self._flights[0]
        assert flight.launched is not None, "a step that was not launched is never read"
        rows = flight.launched.result()
        if len(rows) != len(flight.sequences):
            raise EngineError(f"A step gave {len(rows)} vectors, not {len(flight.sequences)}.")
        self._flights.popleft()
        self._stats.batch_tokens = flight.tokens
        output = StepOutput()
        for sequence, row in zip(flight.sequences, rows, strict=True):
            if sequence.finish is None:
                assert sequence.request.pooling is not None, "add refuses others"
                vector = finish_vector(row, sequence.request.pooling, self.executor.pooling)
                sequence.finish = FinishReason.STOP
                output.vectors.append((sequence, vector.tobytes()))
                output.started.append(sequence)
                output.finished.append(sequence)
        return output


def finish_vector(row: NDArray[np.float32], params: PoolingParams, spec: PoolingSpec) -> NDArray[np.float32]:
    """A row's pooled values as the request wants them: cut, then normalized; of a score, its activation."""
    if spec.task is Task.SCORE:
        score = float(row[0])
        if spec.sigmoid:
            # The form whose exponential cannot overflow.
            score = 1.0 / (1.0 + math.exp(-score)) if score >= 0 else math.exp(score) / (1.0 + math.exp(score))
        return np.array([score], dtype=np.float32)
    vector = row if params.dimensions is None else row[: params.dimensions]
    if spec.normalize if params.normalize is None else params.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), LEAST_NORM)
    return vector.astype(np.float32, copy=False)


def _row(request: Request) -> PoolRow:
    pooling = request.pooling
    return PoolRow(request.prompt_token_ids, pooling.second_segment if pooling is not None else 0)


def _check_pooling(pooling: PoolingParams, size: int, length: int) -> None:
    """Raise RequestError for what no vector of `size` and no text of `length` tokens has."""
    dimensions, second = pooling.dimensions, pooling.second_segment
    if dimensions is not None and not (type(dimensions) is int and 0 < dimensions <= size):
        raise RequestError(f"dimensions must be between 1 and {size}.", param="dimensions")
    if type(second) is not int or not 0 <= second <= length:
        raise RequestError(f"second_segment must be between 0 and {length}.", param="second_segment")
