"""What a soak proves: each finding with its figures, and whether it held.

Invariants: pure; the first tenth is warming up and counts in no comparison; what was not measured is said, and is no
success.
Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from stoker_runtime.bench.soak.held import Held
from stoker_runtime.bench.soak.tally import Gaps, Sample, Tally

EARLY, LATE = (0.1, 0.4), (0.7, 1.01)
FEWEST_GAPS = 100


@dataclass(frozen=True, slots=True)
class Bounds:
    """What still counts as flat: growth of memory as a share and in MiB (the larger), P99 of gaps as a factor."""

    growth: float
    growth_mib: float
    drift: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `held` is None where it could not be."""

    name: str
    held: bool | None
    said: str


def judge_answers(tally: Tally) -> Finding:
    """Whether each request ended as it should."""
    kinds = {kind for kind, _ in tally.ends}
    bad = sum(tally.count(end) for end in ("wrong", "failed", "cut", "unended"))
    words = [f"{kind}: {each}" for (kind, _), kept in tally.wrong.items() for each in kept]
    said = f"{tally.requests - bad} of {tally.requests} requests of {len(kinds)} kinds ended as they should"
    said += f" ({tally.count('full')} of them with 429), {tally.tokens} tokens, at most {tally.most_streams} streams"
    return Finding("answers", bad == 0 and tally.requests > 0, "; ".join([said, *words]))


def judge_held(before: Held, after: Held) -> Finding:
    """Whether nothing is held that was not held before the load."""
    more = after.beyond(before)
    if more:
        return Finding("held", False, f"still held: {', '.join(more)}")
    said = f"{after.kv_pages} KV pages, {after.slots} slots, {after.handles} handles, {after.tasks} tasks, "
    return Finding("held", True, said + f"{after.descriptors} files and sockets: no more than before")


def judge_memory(name: str, samples: Sequence[Sample], bounds: Bounds, of: Callable[[Sample], float | None]) -> Finding:
    """Whether memory late in the load is what it was after the first tenth."""

    def middle(part: tuple[float, float]) -> float | None:
        values = [value for each in samples if part[0] <= each.at < part[1] and (value := of(each)) is not None]
        return median(values) if values else None

    early, late = middle(EARLY), middle(LATE)
    if early is None or late is None:
        return Finding(name, None, "not measured")
    allowed = max(bounds.growth * early, bounds.growth_mib)
    said = f"{early:.0f} MiB early, {late:.0f} MiB late (may grow by {allowed:.0f})"
    return Finding(name, late - early <= allowed, said)


def judge_gaps(gaps: Sequence[Gaps], own: Sequence[Gaps], bounds: Bounds) -> Finding:
    """Whether the 99th percentile of gaps between tokens stayed; `own`: how late this program's own loop was, which is
    in them.
    """

    def parts(of: Sequence[Gaps]) -> tuple[Gaps, Gaps]:
        return Gaps.together(of[1:4]), Gaps.together(of[-3:])

    early, late = parts(gaps)
    if min(early.count, late.count) < FEWEST_GAPS:
        return Finding("gaps", None, f"too few to compare: {early.count} early, {late.count} late")
    first, last = early.quantile(0.99) * 1e3, late.quantile(0.99) * 1e3
    said = f"P99 between events {first:.1f} ms early, {last:.1f} ms late (may grow {bounds.drift:g}-fold)"
    said += "; this program's own loop {:.1f} and {:.1f}".format(*(each.quantile(0.99) * 1e3 for each in parts(own)))
    return Finding("gaps", last <= first * bounds.drift, said)


def judge_texts(differing: Sequence[str], compared: int, allowed: int) -> Finding:
    """Whether seeded texts are the same alone as they were among others."""
    said = f"{compared - len(differing)} of {compared} sampled texts equal their lone runs"
    return Finding("texts", len(differing) <= allowed if compared else None, "; ".join([said, *differing[:3]]))


def verdict(findings: Sequence[Finding]) -> list[str]:
    """The last lines of a run: whether it passed, and each finding that did not hold with its figures."""
    failed = [finding for finding in findings if finding.held is False]
    if not failed:
        return ["soak: passed"]
    named = [f"  {finding.name}: {finding.said}" for finding in failed]
    return [f"soak: FAILED by {len(failed)} of {len(findings)} findings:", *named]
