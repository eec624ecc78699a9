"""Whether a schedule has pods run now, until when, and when it does next.

From a moment of `start` to the next of `end` is a span; where one begins anew before it has ended, it goes on.
Invariants: pure; times come and go aware. A time of day that a change of the clocks leaves out comes right after the
change, and one that there is twice comes once, the first time: as Debian's cron has it.
Knows nothing of sleep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from stoker_operator.spec.sleeping import Hours

# More than any clock is ever changed by: moments around a change are searched from before and from behind it.
_MARGIN = timedelta(hours=3)


@dataclass(frozen=True, slots=True)
class Span:
    """The schedule has at least `least` pods run until `until`; `hours` is the entry that says so longest."""

    hours: Hours
    least: int
    until: datetime

    @property
    def said(self) -> str:
        """The end in words, in the entry's own time zone."""
        local = self.until.astimezone(ZoneInfo(self.hours.timezone))
        return f"{local.strftime('%Y-%m-%d %H:%M')} ({self.hours.timezone})"


def span_at(schedule: Sequence[Hours], now: datetime) -> Span | None:
    """What the schedule says of this moment; None, nothing: no entry has begun, or each has ended."""
    running = [each for each in schedule if _runs(each, now)]
    if not running:
        return None
    least = max(each.least for each in running)
    last, until = _longest(running, now)
    # Where another entry takes over, pods go on running.
    for _ in schedule:
        more = [each for each in schedule if _runs(each, until)]
        if not more:
            break
        last, until = _longest(more, until)
    return Span(last, least, until)


def next_change(schedule: Sequence[Hours], now: datetime) -> datetime | None:
    """When an entry begins or ends next; None without a schedule."""
    return min((_after(text, each.timezone, now) for each in schedule for text in (each.start, each.end)), default=None)


def next_start(schedule: Sequence[Hours], now: datetime) -> datetime | None:
    """When an entry begins next; None without a schedule."""
    return min((_after(each.start, each.timezone, now) for each in schedule), default=None)


def _runs(each: Hours, now: datetime) -> bool:
    return _upto(each.start, each.timezone, now) > _upto(each.end, each.timezone, now)


def _longest(running: Sequence[Hours], now: datetime) -> tuple[Hours, datetime]:
    ends = [(_after(each.end, each.timezone, now), each) for each in running]
    until, last = max(ends, key=lambda pair: pair[0])
    return last, until


def _upto(expression: str, timezone: str, now: datetime) -> datetime:
    """The expression's last moment, this one included."""
    return _moment(expression, timezone, now.replace(second=0, microsecond=0), back=True)


def _after(expression: str, timezone: str, now: datetime) -> datetime:
    """The expression's next moment, this one not included."""
    return _moment(expression, timezone, now.replace(second=0, microsecond=0), back=False)


@functools.lru_cache(maxsize=4096)
def _moment(expression: str, timezone: str, minute: datetime, *, back: bool) -> datetime:
    begin = (minute + (_MARGIN if back else -_MARGIN)).astimezone(ZoneInfo(timezone))
    for found in CronSim(expression, begin, reverse=back):
        at = found.astimezone(UTC)
        if at <= minute if back else at > minute:
            return at
    raise AssertionError(f"{expression!r} has no moment, though its reader found one")
