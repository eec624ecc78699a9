"""The work queue: keys to reconcile, each once, never twice at the same time, not faster than a given rate.

Invariants: a key that is added while it is being worked on is worked on again afterwards; a failure is
tried again after a delay that doubles, per key; one key's failures never delay another key; the cost of a key does not
grow with the number of keys that wait.
Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import Awaitable, Callable

from stoker_operator import metrics

log = logging.getLogger("stoker.operator")
Key = tuple[str, str]
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 300.0


class WorkQueue:
    """`work(namespace, name)` returns seconds until the key is due again, or None; `per_second` bounds all
    keys.
    """

    def __init__(self, work: Callable[[str, str], Awaitable[float | None]], *, workers: int, per_second: float) -> None:
        self._work = work
        self._workers = workers
        self._interval = 1.0 / per_second
        self._due: dict[Key, float] = {}
        # (due, key), earliest first; an entry that _due contradicts is stale, and active keys are left out.
        self._order: list[tuple[float, Key]] = []
        self._active: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._next_start = 0.0
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """Keys that wait and are due."""
        now = time.monotonic()
        return sum(due <= now for due in self._due.values())

    @property
    def longest_active(self) -> float:
        """Seconds that the slowest reconcile in progress has taken so far; 0 when none is."""
        now = time.monotonic()
        return max((now - started for started in self._active.values()), default=0.0)

    async def add(self, key: Key, after: float = 0.0) -> None:
        """Have `key` worked on in `after` seconds, or when it is due anyway if that is earlier."""
        due = time.monotonic() + after
        async with self._changed:
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                self._line_up(key)

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
                self._line_up(key)
            if again is not None:
                await self.add(key, again)

    async def _take(self) -> Key:
        """Wait for a key that is due and not being worked on, and for the rate to allow it."""
        async with self._changed:
            while True:
                now, earliest = time.monotonic(), self._earliest()
                start = max(earliest[0], self._next_start) if earliest else None
                if earliest and start is not None and start <= now:
                    key = heapq.heappop(self._order)[1]
                    del self._due[key]
                    self._active[key] = now
                    self._next_start = now + self._interval
                    if self._order:
                        self._changed.notify()  # one worker was woken; there is more
                    return key
                # Python 3.11's wait_for may swallow a cancellation: the worker would work on, whoever leads by then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if start is None else start - now):
                        await self._changed.wait()

    def _line_up(self, key: Key) -> None:
        """Have a worker look at a key that waits, unless one works on it: then this comes again when it is done."""
        if key in self._due and key not in self._active:
            heapq.heappush(self._order, (self._due[key], key))
            self._changed.notify()

    def _earliest(self) -> tuple[float, Key] | None:
        """The first of the keys that wait and are not worked on."""
        while self._order and (
            self._order[0][1] in self._active or self._due.get(self._order[0][1]) != self._order[0][0]
        ):
            heapq.heappop(self._order)
        return self._order[0] if self._order else None

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
