"""The work queue: keys to reconcile, each once, never twice at the same time, not faster than a given rate.

Invariants: a key that is added while it is being worked on is worked on again afterwards; a failure is
tried again after a delay that doubles, per key; one key's failures never delay another key; the cost of a key does not
grow with the number of keys that wait. What is only looked at now and then (`routine`) waits for what is not, for a
minute at most.
Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from stoker_operator import metrics

log = logging.getLogger("stoker.operator")
Key = tuple[str, str]
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 300.0
ROUTINE_WAITS_SECONDS = 60.0


@dataclass(slots=True)
class _Lane:
    """Keys by when they are due. `order` has them earliest first; an entry that `due` contradicts is stale, and keys
    that are worked on are left out.
    """

    due: dict[Key, float] = field(default_factory=dict)
    order: list[tuple[float, Key]] = field(default_factory=list)

    def first(self, active: Container[Key]) -> tuple[float, Key] | None:
        """The first of the keys that wait and are not worked on."""
        while self.order and (self.order[0][1] in active or self.due.get(self.order[0][1]) != self.order[0][0]):
            heapq.heappop(self.order)
        return self.order[0] if self.order else None


class WorkQueue:
    """`work(namespace, name)` returns seconds until the key is due again, or None; `per_second` bounds all
    keys.
    """

    def __init__(self, work: Callable[[str, str], Awaitable[float | None]], *, workers: int, per_second: float) -> None:
        self._work = work
        self._workers = workers
        self._interval = 1.0 / per_second
        self._changes, self._routine = _Lane(), _Lane()
        self._active: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._next_start = 0.0
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """Keys that wait and are due."""
        now = time.monotonic()
        return len({key for lane in self._lanes for key, due in lane.due.items() if due <= now})

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._changes, self._routine

    @property
    def longest_active(self) -> float:
        """Seconds that the slowest reconcile in progress has taken so far; 0 when none is."""
        now = time.monotonic()
        return max((now - started for started in self._active.values()), default=0.0)

    async def add(self, key: Key, after: float = 0.0, *, routine: bool = False) -> None:
        """Have `key` worked on in `after` seconds, or when it is due anyway if that is earlier. `routine`: others go
        first, for all that is known nothing happened to it.
        """
        due, lane = time.monotonic() + after, self._routine if routine else self._changes
        async with self._changed:
            if due < lane.due.get(key, float("inf")):
                lane.due[key] = due
                self._line_up(key, lane)

    async def run(self) -> None:
        """Work until cancelled."""
        # Whoever reads the metric has the keys counted: to do so for each of them would cost more the more there are.
        metrics.QUEUE_LENGTH.set_function(lambda: float(len(self)))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            key = await self._take()
            again = await self._attempt(key)
            async with self._changed:
                del self._active[key]
                self._line_up(key, *self._lanes)
            if again is not None:
                await self.add(key, again)

    async def _take(self) -> Key:
        """Wait for a key that is due and not being worked on, and for the rate to allow it."""
        async with self._changed:
            while True:
                now, first = time.monotonic(), self._first()
                start = max(first[0], self._next_start) if first else None
                if first and start is not None and start <= now:
                    key = first[1]
                    for lane in self._lanes:
                        lane.due.pop(key, None)
                    self._active[key] = now
                    self._next_start = now + self._interval
                    if self._first():
                        self._changed.notify()  # one worker was woken; there is more
                    return key
                # Python 3.11's wait_for may swallow a cancellation: the worker would work on, whoever leads by then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if start is None else start - now):
                        await self._changed.wait()

    def _line_up(self, key: Key, *lanes: _Lane) -> None:
        """Have a worker look at a key that waits, unless one works on it: then this comes again when it is done."""
        for lane in lanes:
            if key in lane.due and key not in self._active:
                heapq.heappush(lane.order, (lane.due[key], key))
                self._changed.notify()

    def _first(self) -> tuple[float, Key] | None:
        """When the next key is due, and which: of those that are due already a change, but for what waited too long."""
        change, routine = (lane.first(self._active) for lane in self._lanes)
        if change is None or routine is None:
            return change or routine
        waits = ROUTINE_WAITS_SECONDS if change[0] <= time.monotonic() else 0.0
        return change if change[0] <= routine[0] + waits else routine

    async def _attempt(self, key: Key) -> float | None:
        """One reconcile; an error of any kind becomes a delay, since the next look may find things changed."""
        try:
            again = await self._work(*key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 1), LONGEST_BACKOFF_SECONDS)
            expected = type(error).__name__ in ("ApiError", "ApplyFailed")
            log.warning("%s/%s: reconcile failed, next try in %.0f s: %s", *key, delay, error, exc_info=not expected)
            metrics.RECONCILES.labels(result="error").inc()
            return delay
        self._failures.pop(key, None)
        metrics.RECONCILES.labels(result="ok").inc()
        return again
