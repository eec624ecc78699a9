"""Tells a hung engine from a busy or an idle one, by what is heard from it.

A step on a CPU may rightly take minutes, so there a process that computes is given `PATIENCE` times as long.

Invariants: time is counted in ticks of the process that watches, each worth at most two intervals, so a stall of
the watcher itself never counts as silence of the engine. Pure: it is told the time.
Knows nothing of processes and sockets.
"""

from __future__ import annotations

PATIENCE = 10


class Watchdog:
    """Counts silence (nothing heard) and stalls (no new step while work is pending)."""

    def __init__(self, interval: float, silence_seconds: float, hang_seconds: float) -> None:
        self._interval = interval
        self._silence_seconds = silence_seconds
        self._hang_seconds = hang_seconds
        self._steps = -1
        self._last_tick: float | None = None
        self.silence = 0.0
        """Seconds since the last message."""
        self.stall = 0.0
        """Seconds since the last new step, while work was pending."""
        self.dead_stall = 0.0
        """The same, without the seconds in which the process computed."""

    def heard(self, steps: int) -> None:
        """A message came; the engine has launched `steps` steps since its start."""
        self.silence = 0.0
        if steps != self._steps:
            self._steps = steps
            self.stall = self.dead_stall = 0.0

    def tick(self, now: float, *, pending: bool, computing: bool = False) -> str | None:
        """Call every `interval`; the reason, once the engine must be taken for hung."""
        elapsed = 0.0 if self._last_tick is None else min(now - self._last_tick, 2 * self._interval)
        self._last_tick = now
        self.silence += elapsed
        if not pending:
            self.stall = self.dead_stall = 0.0
            # A step that takes long sends no heartbeat, so silence alone says something only without work.
            return f"it sent no heartbeat for {self.silence:.0f} s" if self.silence > self._silence_seconds else None
        self.stall += elapsed
        self.dead_stall += 0.0 if computing else elapsed
        if self.dead_stall > self._hang_seconds or self.stall > PATIENCE * self._hang_seconds:
            return f"it has work but took no step for {self.stall:.0f} s"
        return None
