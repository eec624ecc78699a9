"""The executors of several ranks: the leader's tells the others of each step, theirs run it and keep nothing.

Invariants: every rank makes the same calls on its model in the same order. A step that fails on one rank ends all of
them. At most two steps are in flight on each.
Knows nothing of how ranks are started or watched.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from stoker_runtime.errors import EngineDeadError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.graphs.step_shape import StepShape
from stoker_runtime.executor.launched import Launched
from stoker_runtime.executor.resolve import SCORED_ROWS
from stoker_runtime.executor.sleep import DeviceSleep
from stoker_runtime.parallel.adapter_order import AdapterOrder
from stoker_runtime.parallel.adapters import RankAdapters
from stoker_runtime.parallel.decoder import RankDecoder
from stoker_runtime.ranks.sleep import LeadSleep, RankSleep
from stoker_runtime.ranks.wire import IDLE, STOP, Wire, adapter_message, command
from stoker_runtime.sampling.logprobs import PendingPromptLogprobs
from stoker_runtime.sampling.modes import MASKED
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import MaskRows, StepResult

IN_FLIGHT = 2


class Others(Protocol):
    """The other ranks, as the leader's executor needs them: `ranks/crew.py`."""

    calls: int

    def write(self, message: bytes) -> None:
        """Tell every rank. Raises EngineDeadError when they are gone."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError when a rank has died or hangs."""
        ...

    def explain(self, error: Exception) -> EngineDeadError:
        """The error of a step that failed as `error`."""
        ...

    def close(self) -> None:
        """End them. Idempotent."""
        ...


class RankExecutor(Executor):
    """What all ranks do alike."""

    decoder: RankDecoder
    adapters: RankAdapters | None
    sleep_kind: type[DeviceSleep] = RankSleep

    def rehearse(self) -> None:
        """As `Executor.rehearse`, by each rank for itself: how much is rehearsed depends on its layers."""
        with self.decoder.collectives.quiet():
            super().rehearse()


class LeadingExecutor(RankExecutor):
    """The leader's: the engine's `Executor` for all ranks together."""

    sleep_kind = LeadSleep

    def __init__(self, *args: Any, others: Others, **kwargs: Any) -> None:
        """`args` and `kwargs` as `Executor` takes them."""
        self._others = others
        self._wire = Wire()
        self._telling = threading.Lock()
        self.asking = threading.Lock()
        """Held by the thread whose question the other ranks answer: what else is asked waits."""
        self._closed = False
        super().__init__(*args, **kwargs)
        if self.adapters is not None:
            self.adapters.others = self

    def execute(self, batch: Batch) -> LedStep:  # type: ignore[override]
        """As `Executor.execute`, on every rank. Raises EngineDeadError when a rank is gone."""
        with self.waiting():
            self._others.write(self._wire.encode(batch))
            return LedStep(super().execute(batch), self)

    def idle(self) -> bool:
        """As `Executor.idle`, on every rank."""
        with self.waiting():
            self._others.write(command(IDLE))
            return super().idle()

    def tell(self, order: int | AdapterOrder) -> None:
        """Give every other rank an order, from any thread. Raises EngineDeadError when they are gone."""
        self._others.check()
        with self._telling:
            self._others.write(command(order) if isinstance(order, int) else adapter_message(order))

    @contextmanager
    def meeting(self) -> Iterator[bool]:
        """Within it the other ranks answer; False where they answer another thread."""
        if not self.asking.acquire(blocking=False):
            yield False
            return
        try:
            with self.waiting():
                yield True
        finally:
            self.asking.release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, other ranks can keep the leader waiting. Whatever fails there ends all of them."""
        self._others.check()
        self._others.calls += 1
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            raise self._others.explain(error) from error
        finally:
            self._others.calls += 1

    def describe(self) -> dict[str, str]:
        """As `Executor.describe`, with the ranks."""
        place = self.decoder.collectives.place
        return {**super().describe(), "tensor_parallel": str(place.tensors), "pipeline_parallel": str(place.stages)}

    def close(self) -> None:
        """End all ranks."""
        if self._closed:
            return
        self._closed = True
        with_all = True
        try:
            self._others.check()
            self._others.write(command(STOP))
            self.graphs.clear()
            self.decoder.collectives.close()
        except EngineDeadError:
            with_all = False
        self._others.close()
        if not with_all and self.device.type == "cpu":
            # The other ranks are dead, and gloo waits for none; NCCL would.
            self.decoder.collectives.close()
        super().close()


class LedStep:
    """A step of all ranks on its way, as `Launched`; while the leader waits for it, it is watched."""

    def __init__(self, launched: Launched, leader: LeadingExecutor) -> None:
        self._launched = launched
        self._leader = leader

    @property
    def masks(self) -> MaskRows | None:
        """`Launched.masks`."""
        return self._launched.masks

    @property
    def batch(self) -> Batch:
        """`Launched.batch`."""
        return self._launched.batch

    def sample(self) -> None:
        """`Launched.sample`."""
        with self._leader.waiting():
            self._launched.sample()

    def result(self) -> StepResult:
        """`Launched.result`. Raises EngineDeadError when a rank is gone."""
        with self._leader.waiting():
            return self._launched.result()


class FollowingExecutor(RankExecutor):
    """Another rank's: runs what the leader tells, samples nothing, reads nothing back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: deque[torch.cuda.Event] = deque()

    def execute(self, batch: Batch) -> Launched:
        """As `Executor.execute`; waits for the step before the last, whose staging memory this one may use."""
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.popleft().synchronize()
        launched = super().execute(batch)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._in_flight.append(event)
        return launched

    def _read_back(self, batch: Batch, shape: StepShape, logits: torch.Tensor) -> Launched:
        if shape.mode == MASKED:
            # The leader chooses once it has the masks; its tokens are awaited where it shares them.
            self.body.choose(shape, logits)
        return Launched(batch, self._host_tokens[0][:0], [])

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor, targets: list[int]) -> list[PendingPromptLogprobs]:
        """Its part of the logits that the leader scores, in the same portions."""
        at = 0
        for chunk in batch.prefills:
            end = at + len(chunk.targets)
            for first in range(at, end, SCORED_ROWS):
                part = slice(first, min(first + SCORED_ROWS, end))
                step = self.body.adapters
                adapters = step.of_sequence(chunk.slot, part.stop - part.start) if step is not None else None
                self.decoder.logits(hidden[part], adapters=adapters)
            at = end
        return []

    def close(self) -> None:
        """Leave the other ranks."""
        self.graphs.clear()
        self.decoder.collectives.close()
        super().close()
