"""hours.py: spans of a schedule, over days, weeks and changes of the clocks."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from stoker_operator.plan.sleep.hours import next_change, next_start, span_at
from stoker_operator.spec.sleeping import Hours

OFFICE = Hours("0 8 * * 1-5", "0 18 * * 1-5", "Europe/Berlin", 2)


def at(text: str, zone: str = "Europe/Berlin", *, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)


@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2026-01-16T07:59:59", None),  # a Friday
        ("2026-01-16T08:00:00", "2026-01-16T18:00:00"),
        ("2026-01-16T17:59:59.9", "2026-01-16T18:00:00"),
        ("2026-01-16T18:00:00", None),
        ("2026-01-17T12:00:00", None),
        ("2026-03-27T09:00:00", "2026-03-27T18:00:00"),
        ("2026-03-30T08:30:00", "2026-03-30T18:00:00"),  # the first day of summer time
    ],
)
def test_a_span_goes_from_its_start_to_its_end_in_its_time_zone(now: str, until: str | None) -> None:
    span = span_at([OFFICE], at(now).astimezone(UTC))
    assert (span.until if span else None) == (at(until) if until else None)
    assert span is None or (span.least, span.said) == (2, f"{now[:10]} 18:00 (Europe/Berlin)")


# (start, end, zone) and moments with whether pods run: around a time that is left out, and one that comes twice.
CLOCKS: dict[str, tuple[Hours, list[tuple[datetime, bool]]]] = {
    "a start that is left out comes right after": (
        Hours("30 2 * * *", "0 6 * * *", "Europe/Berlin"),
        [(at("2026-03-29T01:59"), False), (at("2026-03-29T03:00"), True), (at("2026-03-29T05:59"), True)],
    ),
    "an end that is left out comes right after": (
        Hours("0 0 * * *", "15 2 * * *", "America/New_York"),
        [(at("2026-03-08T01:59", "America/New_York"), True), (at("2026-03-08T03:00", "America/New_York"), False)],
    ),
    "a start that comes twice counts the first time": (
        Hours("30 2 * * *", "0 6 * * *", "Europe/Berlin"),
        [(at("2026-10-25T02:29"), False), (at("2026-10-25T02:30"), True), (at("2026-10-25T02:10", fold=1), True)],
    ),
    "an end that comes twice counts the first time": (
        Hours("0 22 * * *", "30 2 * * *", "Europe/Berlin"),
        [(at("2026-10-25T02:29"), True), (at("2026-10-25T02:30"), False), (at("2026-10-25T02:10", fold=1), False),
         (at("2026-10-25T02:45", fold=1), False)],
    ),
    "hours that are counted go by real time": (
        Hours("0 * * * *", "40 * * * *", "Australia/Lord_Howe"),  # half an hour is put back
        [(at("2026-04-05T01:35", "Australia/Lord_Howe"), True),
         (at("2026-04-05T01:35", "Australia/Lord_Howe", fold=1), True),
         (at("2026-04-05T01:45", "Australia/Lord_Howe", fold=1), False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOCKS)
def test_where_the_clocks_are_changed(case: str) -> None:
    hours, moments = CLOCKS[case]
    assert [(when, span_at([hours], when.astimezone(UTC)) is not None) for when, _ in moments] == moments


def test_entries_that_overlap_or_follow_each_other_are_one_span() -> None:
    schedule = [
        Hours("0 8 * * *", "0 12 * * *", least=1),
        Hours("0 11 * * *", "0 14 * * *", least=3),
        Hours("0 14 * * *", "30 15 * * *", least=2),
        Hours("0 20 * * *", "0 21 * * *", least=9),
    ]
    span = span_at(schedule, datetime(2026, 5, 4, 11, 30, tzinfo=UTC))
    assert span is not None
    assert (span.least, span.until) == (3, datetime(2026, 5, 4, 15, 30, tzinfo=UTC))
    night = datetime(2026, 5, 4, 22, tzinfo=UTC)
    assert next_start(schedule, night) == next_change(schedule, night) == datetime(2026, 5, 5, 8, tzinfo=UTC)
    assert next_change(schedule, datetime(2026, 5, 4, 20, tzinfo=UTC)) == datetime(2026, 5, 4, 21, tzinfo=UTC)


def test_at_each_change_and_only_there_it_is_another_span() -> None:
    """Random schedules through two weeks with a change of the clocks, against looking every quarter of an hour."""
    choose = random.Random()
    for zone, begin in (("Europe/Berlin", (2026, 3, 22)), ("America/Santiago", (2026, 9, 1))):
        hour, minutes = choose.randrange(24), [choose.choice([0, 15, 45]) for _ in range(2)]
        later = (hour + choose.randrange(2, 23)) % 24  # never both in an hour that is left out
        schedule = [Hours(f"{minutes[0]} {hour} * * *", f"{minutes[1]} {later} * * *", zone)]
        now = datetime(*begin, tzinfo=UTC)
        change = next_change(schedule, now)
        runs = span_at(schedule, now) is not None
        for _ in range(14 * 96):
            now += timedelta(minutes=15)
            assert change is not None
            if now >= change:
                change, runs = next_change(schedule, now), not runs
            assert (span_at(schedule, now) is not None) == runs, f"{schedule} at {now}"
