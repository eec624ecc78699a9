"""spec.autoscaling.scaleToZero: when no pods run, what becomes of requests then, and the hours in which pods run.

Invariants: as in service.py: frozen, with the CRD's defaults and rules. Hours are spelled as KEDA's cron scaler spells
them: two cron expressions in a time zone; the number of pods is called as autoscaling calls it.
Knows nothing of what time it is.
"""

from __future__ import annotations

import re
import zoneinfo
from dataclasses import dataclass
from datetime import datetime

from cronsim import CronSim, CronSimError

from stoker_operator.spec.reader import Reader

MOST_HOURS = 16
LONGEST_CRON = 64
_MONTHS = "JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC"
_DAYS = "SUN|MON|TUE|WED|THU|FRI|SAT"
_FIELDS = ("[0-5]?[0-9]", "[01]?[0-9]|2[0-3]", "0?[1-9]|[12][0-9]|3[01]", f"0?[1-9]|1[0-2]|{_MONTHS}", f"[0-7]|{_DAYS}")


def _list_of(value: str) -> str:
    """A cron field: `*`, values and spans, with a step or without."""
    term = rf"(\*|({value})(-({value}))?)(/[1-9][0-9]?)?"
    return f"{term}(,{term})*"


CRON_PATTERN = f"^(?i:{' '.join(map(_list_of, _FIELDS))})$"
ZONE_PATTERN = r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$"


@dataclass(frozen=True, slots=True)
class Hours:
    """From each moment of `start` to the next of `end`, at least `least` pods run. Both are cron expressions of five
    fields in `timezone`, a name of the IANA database.
    """

    start: str
    end: str
    timezone: str = "UTC"
    least: int = 1


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """When no pods run, and what becomes of requests then. Seconds: `idle_after` the last request, and `max_wait` of a
    request that is held; `max_queued` are held at most. During `schedule` pods run whether anybody asks or not.
    """

    idle_after: int = 900
    max_queued: int = 100
    max_wait: int = 600
    schedule: tuple[Hours, ...] = ()


def read_scale_to_zero(r: Reader) -> ScaleToZero:
    """spec.autoscaling.scaleToZero."""
    found = ScaleToZero(
        r.duration("idleAfter", 900, least=1, most=604800),
        r.integer("maxQueued", default=100, least=1, most=10000),
        r.duration("maxWait", 600, least=1, most=3600),
        tuple(
            _hours(Reader(raw, f"{r.path}.schedule[{index}]", r.problems))
            for index, raw in enumerate(r.objects("schedule", most=MOST_HOURS))
        ),
    )
    r.finish()
    return found


def _hours(r: Reader) -> Hours:
    before = len(r.problems)
    found = Hours(
        start=r.text("start", longest=LONGEST_CRON, required=True),
        end=r.text("end", longest=LONGEST_CRON, required=True),
        timezone=r.text("timezone", default="UTC", pattern=ZONE_PATTERN, longest=64),
        least=r.integer("min", default=1, least=1, most=1000),
    )
    r.finish()
    if len(r.problems) > before:
        return found
    if found.start == found.end:
        r.problems.append(f"{r.path}: start and end are the same moments")
    try:
        zone = zoneinfo.ZoneInfo(found.timezone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        r.problems.append(f"{r.path}.timezone: {found.timezone!r} is not in the IANA database; such as Europe/Berlin")
        return found
    for key, expression in (("start", found.start), ("end", found.end)):
        why = _cron_problem(expression, zone)
        if why:
            r.problems.append(f"{r.path}.{key}: {expression!r} {why}")
    return found


def _cron_problem(expression: str, zone: zoneinfo.ZoneInfo) -> str:
    """Why the expression names no moments; "" where it does."""
    if re.fullmatch(CRON_PATTERN, expression) is None:
        return "must be five fields of cron: minute, hour, day of the month, month, day of the week"
    try:
        next(CronSim(expression, datetime(2026, 1, 1, tzinfo=zone)))
    except (CronSimError, StopIteration) as error:
        return f"never comes: {error}" if str(error) else "never comes"
    return ""
