"""Tells ranks that hang from ranks that work, by what the system says of their processes and what the leader waits for.

A rank that is stopped is in a state of its own. An exchange that never answers leaves all ranks waiting: on a CPU none
of them uses its processor, on a GPU the leader's wait takes longer than any step.

Invariants: seconds are counted in ticks of the process that watches, each worth at most two intervals, so that a stall
of the watcher itself counts for nobody's. A rank that only gets little of a busy machine is never taken for hung on a
CPU. Pure: it is told the time.
Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WATCH_SECONDS = 0.25
"""The interval at which ranks are looked at."""
STOPPED_SECONDS = 2.0
WAIT_SECONDS = 3.0
"""How long the leader may wait for a step of a GPU, unless the longest one may take more."""
STILL_SECONDS = 3.0
SILENT_SECONDS = 10.0
"""How long another machine may send no beat: one that is crowded sends them late."""
WORK_SECONDS = 0.1
"""Processor seconds of all ranks together within that time that count as work. Watching takes a hundredth of it."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of one rank: whether it is stopped, and its processor seconds."""

    stopped: bool
    seconds: float


class Watch:
    """Counts how long each rank is stopped, and all are still."""

    def __init__(self, interval: float, *, on_gpu: bool, longest_step: float = 0.0) -> None:
        """`longest_step`: seconds that a step of a GPU may take."""
        self._interval = interval
        self._on_gpu = on_gpu
        self._most_wait = max(WAIT_SECONDS, longest_step)
        self._last_tick: float | None = None
        self._stopped: dict[int, float] = {}
        self._still = 0.0
        self._wait = 0.0
        self._worked_until = 0.0
        self._calls = 0

    def tick(self, now: float, lives: Sequence[Life], calls: int) -> str | None:
        """Call every `interval`; the reason, once a rank must be taken for hung.

        `calls` is even while the leader waits for nothing, and odd within a call.
        """
        elapsed = 0.0 if self._last_tick is None else min(now - self._last_tick, 2 * self._interval)
        self._last_tick = now
        for rank, life in enumerate(lives):
            self._stopped[rank] = self._stopped.get(rank, 0.0) + elapsed if life.stopped else 0.0
            if self._stopped[rank] > STOPPED_SECONDS:
                return f"rank {rank} has been stopped for {self._stopped[rank]:.0f} s"
        return self._waits(elapsed, sum(life.seconds for life in lives), calls)

    def _waits(self, elapsed: float, seconds: float, calls: int) -> str | None:
        waits = calls % 2 == 1 and calls == self._calls
        works = seconds - self._worked_until > WORK_SECONDS
        self._calls = calls
        self._wait = self._wait + elapsed if waits else 0.0
        self._still = self._still + elapsed if waits and not works else 0.0
        if works or not waits:
            self._worked_until = seconds
        if self._on_gpu and self._wait > self._most_wait:
            return f"a step has not ended for {self._wait:.0f} s"
        if not self._on_gpu and self._still > STILL_SECONDS:
            return f"a step has not ended, and no rank has computed, for {self._still:.0f} s"
        return None


class Silence:
    """Counts how long nothing was heard of another machine, whose watcher sends a beat every `interval`.

    A machine that is gone is told by its kernel (`nodes/connection.py`), and ranks that hang within a step by `Watch`.
    What is left is a node that stands still as a whole while nobody waits for it, so there is time.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_tick: float | None = None
        self.seconds = 0.0
        """Since the last beat."""

    def heard(self) -> None:
        """A beat came. From any thread."""
        self.seconds = 0.0

    def tick(self, now: float, *, heard: bool) -> bool:
        """Call every `interval`; whether it must be taken for hung. `heard`: something came, and is not read yet."""
        elapsed = 0.0 if self._last_tick is None else min(now - self._last_tick, 2 * self._interval)
        self._last_tick = now
        self.seconds = 0.0 if heard else self.seconds + elapsed
        return self.seconds > SILENT_SECONDS
