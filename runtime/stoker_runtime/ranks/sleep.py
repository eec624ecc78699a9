"""Sleep of several ranks: all of them give their memory back, or none; all of them wake up, or none.

Invariants: what may fail is tried by every rank, and they tell each other, before any goes on. Nothing of it counts as
a step that hangs: files may be slow.
Knows nothing of who asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from threading import Lock
from typing import Protocol, cast

from stoker_runtime.errors import StokerError, UnavailableError
from stoker_runtime.executor.sleep import DeviceSleep
from stoker_runtime.parallel.adapters import RankAdapters
from stoker_runtime.parallel.decoder import RankDecoder
from stoker_runtime.request import WAKE_TAGS

SLEEP, WAKE = 16, 32
"""Commands between ranks: plus the level, and plus a bit for each part to wake."""

log = logging.getLogger(__name__)


class Leader(Protocol):
    """The leader's executor."""

    asking: Lock

    def tell(self, order: int) -> None:
        """Give every other rank a command. Raises EngineDeadError when they are gone."""
        ...


class RankSleep(DeviceSleep):
    """One rank's: what it does, all do at the same time."""

    def sleep(self, level: int) -> None:
        """As `DeviceSleep.sleep`, on every rank."""
        self._together(lambda: self.prepare(level), self.settle)
        self.release(level)

    def wake(self, tags: Collection[str]) -> None:
        """As `DeviceSleep.wake`, on every rank."""
        self._together(lambda: self.take(tags), self.undo)
        if self._executor.adapters is not None:
            cast(RankAdapters, self._executor.adapters).take_fresh()
        self.settle()

    def _together(self, act: Callable[[], None], undo: Callable[[], None]) -> None:
        """`act`, and if any rank fails at it `undo`. Raises what failed."""
        error: StokerError | None = None
        try:
            act()
        except StokerError as found:
            error = found
        decoder = cast(RankDecoder, self._executor.decoder)
        if decoder.collectives.least(0 if error else 1):
            return
        if error is None:
            undo()
            error = UnavailableError("Another rank could not; its log says why.", code="no_memory")
        raise error


class LeadSleep(RankSleep):
    """The leader's, who tells the others."""

    def sleep(self, level: int) -> None:
        """As `RankSleep.sleep`. Raises EngineDeadError when a rank is gone."""
        with (leader := cast(Leader, self._executor)).asking:
            leader.tell(SLEEP + level)
            super().sleep(level)

    def wake(self, tags: Collection[str]) -> None:
        """As `RankSleep.wake`. Raises EngineDeadError when a rank is gone."""
        with (leader := cast(Leader, self._executor)).asking:
            leader.tell(WAKE + sum(1 << WAKE_TAGS.index(tag) for tag in tags))
            super().wake(tags)


def obey(sleeper: DeviceSleep | None, order: int) -> None:
    """Do what the leader's order says; what fails is the leader's to tell."""
    assert sleeper is not None, "a rank that cannot sleep is told to"
    try:
        if order >= WAKE:
            sleeper.wake([tag for at, tag in enumerate(WAKE_TAGS) if order - WAKE & 1 << at])
        else:
            sleeper.sleep(order - SLEEP)
    except StokerError as error:
        log.error("%s", error.message)
