"""Between awake and asleep: orders of clients are done one after the other, while heartbeats go on.

    sleep   no new requests from here on; when nothing runs any more, caches are forgotten and the device's memory is
            given back by a thread
    wake    the memory is taken again by the thread, then requests are taken; a sleep that still waits is called off

Invariants: the thread works only while the loop has nothing to do, and the loop starts nothing meanwhile. Every order
is answered once. What sleeps takes no request. Called by the step loop's thread.
Knows nothing of devices, messages or text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from stoker_runtime.engine.executor_protocol import DeviceSleeper
from stoker_runtime.errors import AsleepError, EngineDeadError, EngineError, NotFoundError, RequestError, StokerError
from stoker_runtime.request import WAKE_TAGS, EngineStats
from stoker_runtime.scheduler.scheduler import Scheduler

WAIT_SECONDS = 0.005
"""How long a loop without other work waits for the thread before it looks for messages again."""
LEVELS = (1, 2)
OFF = "This server was started without --enable-sleep-mode, so it does not sleep."

Told = Callable[[StokerError | None], None]
"""Told how an order ended: None when it was done."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """To sleep at `level`, or at 0 to wake `tags`."""

    level: int
    tags: tuple[str, ...]
    told: Told


class Sleeper:
    """Puts one engine to sleep and wakes it. `device` None: it was not started to."""

    def __init__(self, scheduler: Scheduler, device: DeviceSleeper | None) -> None:
        self._scheduler = scheduler
        self._device = device
        self._level = 0
        self._orders: deque[Order] = deque()
        self._job: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def resting(self) -> bool:
        """Whether no request is taken: it sleeps, or there is an order."""
        return bool(self._level or self._orders)

    @property
    def busy(self) -> bool:
        """Whether there is an order that is not done."""
        return bool(self._orders)

    def require_awake(self) -> None:
        """Raises AsleepError where no request is taken."""
        if self.resting:
            raise AsleepError

    def sleep(self, level: int, told: Told) -> None:
        """Sleep at `level` once nothing runs; who sleeps less deep goes down to it.

        `told` comes from a later `advance`. Raises RequestError for another level, NotFoundError where it is off.
        """
        self._require()
        if level not in LEVELS:
            raise RequestError(
                f"level is {level}; it must be 1, weights to host memory, or 2, weights dropped.", param="level"
            )
        self._orders.append(Order(level, (), told))

    def wake(self, tags: Collection[str], told: Told) -> None:
        """Wake these parts, or all where none is named. A sleep that has not begun is called off.

        `told` comes from a later `advance`. Raises RequestError for a part that there is not, NotFoundError where it is
        off.
        """
        self._require()
        for tag in tags:
            if tag not in WAKE_TAGS:
                raise RequestError(f"tags has {tag!r:.40}; the parts are {' and '.join(WAKE_TAGS)}.", param="tags")
        first = 1 if self._job is not None else 0
        waiting, self._orders = list(self._orders)[first:], deque(list(self._orders)[:first])
        for order in waiting:
            if order.level:
                order.told(RequestError("It was woken up before it slept.", code="woken_up"))
            else:
                self._orders.append(order)
        if self._orders or self._level:
            self._orders.append(Order(0, tuple(tags) or WAKE_TAGS, told))
        else:
            told(None)

    def now(self, give: Callable[[Told], None]) -> None:
        """`give` an order of a loop that has nothing to do, and wait for it. Raises what makes it fail."""
        errors: list[StokerError | None] = []
        give(errors.append)
        while not errors:
            self.advance(idle=True)
        if errors[0] is not None:
            raise errors[0]

    def advance(self, *, idle: bool) -> bool:
        """Begin or end what the first order says; an `idle` loop waits a moment for it. Whether it woke up just now."""
        if not self._orders:
            return False
        if self._job is None:
            if not idle:
                return False
            self._begin(self._orders[0])
        assert self._job is not None, "an order has begun"
        wait([self._job], WAIT_SECONDS)
        return self._job.done() and self._end()

    def count(self, stats: EngineStats) -> None:
        """Fill in what `stats` say of sleep."""
        if self._device is None:
            return
        stats.sleep_level = self._level or max((order.level for order in self._orders), default=0)
        stats.asleep = bool(self._level)
        stats.bytes_freed, stats.host_weight_bytes = self._device.bytes_freed, self._device.host_bytes

    def close(self) -> None:
        """Wait for what the thread does. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()

    def _begin(self, order: Order) -> None:
        device = self._require()
        if order.level:
            # Whatever comes of it: a page that is given back by half is nobody's prefix.
            self._scheduler.forget_caches()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sleep")
        act = partial(device.sleep, order.level) if order.level else partial(device.wake, order.tags)
        self._job = self._thread.submit(act)

    def _end(self) -> bool:
        """The thread is done with the first order. Raises EngineDeadError."""
        assert self._job is not None, "nothing ends that did not begin"
        order, cause, device = self._orders.popleft(), self._job.exception(), self._require()
        self._job = None
        was_asleep, self._level = self._level, max(self._level, order.level) if device.asleep else 0
        order.told(None if cause is None else _explained(order, cause))
        if isinstance(cause, EngineDeadError):
            raise cause
        return bool(was_asleep) and not self._level

    def _require(self) -> DeviceSleeper:
        if self._device is None:
            raise NotFoundError(OFF)
        return self._device


def _explained(order: Order, cause: BaseException) -> StokerError:
    """Why an order was not carried out."""
    what = "sleep" if order.level else "wake up"
    log.error("it did not %s: %s", what, cause, exc_info=None if isinstance(cause, StokerError) else cause)
    if isinstance(cause, StokerError):
        return cause
    return EngineError(f"It did not {what}: {type(cause).__name__}: {cause}")
