"""What a soak calls flat, held, ended and equal."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from stoker_runtime.bench.soak.held import Held
from stoker_runtime.bench.soak.judge import (
    Bounds,
    Finding,
    judge_answers,
    judge_gaps,
    judge_held,
    judge_memory,
    judge_texts,
    verdict,
)
from stoker_runtime.bench.soak.load import ladder, level_at
from stoker_runtime.bench.soak.tally import TENTHS, Gaps, Sample, Tally

BOUNDS = Bounds(growth=0.05, growth_mib=20.0, drift=1.5)
IDLE = Held(0, 0, 0, 0, 0, 0, tasks=9, descriptors=31)


def tally_of(**ends: int) -> Tally:
    found = Tally()
    for end, count in ends.items():
        for _ in range(count):
            found.ended("stream", end, "" if end in ("ok", "full") else "words")
    return found


@pytest.mark.parametrize(
    ("ends", "held"),
    [
        ({"ok": 7, "full": 2}, True),
        ({"ok": 7, "wrong": 1}, False),
        ({"ok": 7, "failed": 1}, False),
        ({"ok": 7, "cut": 1}, False),
        ({"ok": 7, "unended": 1}, False),
        ({}, False),
    ],
)
def test_every_request_must_end_well(ends: dict[str, int], held: bool) -> None:
    finding = judge_answers(tally_of(**ends))
    assert finding.held is held
    assert ("words" in finding.said) == bool(ends.keys() - {"ok", "full"})


def test_what_is_held_is_named() -> None:
    assert judge_held(IDLE, IDLE).held
    more = judge_held(IDLE, Held(0, 1, 0, 37, 0, 2, tasks=9, descriptors=30))
    assert more.held is False
    assert more.said == "still held: 1 slots, 37 kv pages, 2 handles"


def samples(first: float, last: float, count: int = 101) -> list[Sample]:
    """Memory that grows evenly, after a first tenth that does not count."""
    return [Sample(at / 100, 5.0 if at < 10 else first + (last - first) * at / 100, None) for at in range(count)]


def test_memory_is_flat_or_not() -> None:
    noisy = [Sample(each.at, each.rss_mib + random.uniform(-9, 9), 100.0) for each in samples(700, 700)]
    assert judge_memory("memory", noisy, BOUNDS, lambda each: each.rss_mib).held
    assert judge_memory("device", noisy, BOUNDS, lambda each: each.device_mib).held
    assert judge_memory("memory", samples(700, 900), BOUNDS, lambda each: each.rss_mib).held is False
    # A share of a large server is more than the MiB of a small one.
    assert judge_memory("memory", samples(9000, 9300), BOUNDS, lambda each: each.rss_mib).held
    assert judge_memory("device", samples(700, 700), BOUNDS, lambda each: each.device_mib).held is None
    assert judge_memory("memory", [], BOUNDS, lambda each: each.rss_mib).held is None


def test_gaps_that_grow_are_found_and_the_first_tenth_is_not() -> None:
    def gaps(*means: float) -> list[Gaps]:
        found = []
        for mean in means:
            found.append(Gaps())
            for _ in range(400):
                found[-1].add(random.uniform(0.5, 1.5) * mean)
        return found

    own = gaps(*[0.001] * 7, *[0.009] * 3)
    assert judge_gaps(gaps(5.0, *[0.02] * (TENTHS - 1)), own, BOUNDS).held
    grown = judge_gaps(gaps(*[0.02] * 7, *[0.05] * 3), own, BOUNDS)
    assert grown.held is False
    # How late the one who measured was stands beside it: early, and late.
    early, late = re.fullmatch(r".*own loop ([\d.]+) and ([\d.]+)", grown.said).groups()  # type: ignore[union-attr]
    assert 1 < float(early) < 2 < 9 < float(late) < 16
    assert judge_gaps([Gaps() for _ in range(TENTHS)], own, BOUNDS).held is None


def test_quantiles_are_within_two_percent() -> None:
    values, gaps = [random.lognormvariate(-4, 1.5) for _ in range(3001)], Gaps()
    for value in values:
        gaps.add(value)
    for share in (0.1, 0.5, 0.99):
        exact = sorted(values)[round(share * 3000)]
        assert gaps.quantile(share) == pytest.approx(exact, rel=0.05)


def test_texts_that_differ() -> None:
    assert judge_texts([], 12, 0).held
    assert judge_texts(["seed 3"], 12, 0).held is False
    assert judge_texts(["seed 3"], 12, 1).held
    assert judge_texts([], 0, 0).held is None


def test_the_ladder_ends_at_the_most() -> None:
    for most in (1, 4, 7, random.randint(20, 4096), 4096):
        steps = ladder(most)
        assert steps[0] == 1
        assert steps[-1] == most
        assert steps == sorted(set(steps))


def test_clients_begin_one_after_the_other() -> None:
    """Every rung is reached, for half of its time, and no moment begins more than its share of the clients."""
    for most in (1, 7, random.randint(20, 4096), 4096):
        steps = ladder(most)
        levels = [level_at(steps, at / 1000 / len(steps)) for at in range(1000 * len(steps))]
        assert levels[0] == 1
        assert levels == sorted(levels)
        assert all(levels.count(step) >= 490 for step in steps)
        assert max((late - early for early, late in pairwise(levels)), default=0) <= most / 300 + 1


def test_the_last_lines_name_each_finding_that_failed_and_no_other() -> None:
    held = [random.choice((True, False, None)) for _ in range(30)] + [False]
    findings = [Finding(f"n{at}", each, f"{random.random()} MiB") for at, each in enumerate(held)]
    first, *named = verdict(findings)
    failed = [finding for finding in findings if finding.held is False]
    assert first == f"soak: FAILED by {len(failed)} of 31 findings:"
    assert named == [f"  {finding.name}: {finding.said}" for finding in failed]
    assert verdict([finding for finding in findings if finding.held is not False]) == ["soak: passed"]
