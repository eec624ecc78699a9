"""How the pods of a canary compare with the stable ones since the comparison began: what each counted meanwhile.

Invariants: a pod counts from the moment it was first seen; one that began anew counts on from zero. What is remembered
is the operator's own: after its restart a comparison begins anew. Read again at once, it says the same, so that a
status that was just written does not ask for another.
Knows nothing of what is good enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, str]
# No scrape more often than this.
FRESH_SECONDS = 5.0
# Of a side with more pods, so many speak for it.
SAMPLED_PODS = 8
_ENDED, _REFUSED = "vllm:request_success_total", "stoker:requests_rejected_total"
_FIRST, _BETWEEN = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_SERIES = (_ENDED, _REFUSED, f"{_FIRST}_sum", f"{_FIRST}_count", f"{_BETWEEN}_sum", f"{_BETWEEN}_count")


@dataclass(frozen=True, slots=True)
class Counters:
    """What a pod has counted: requests that were answered and that failed (a client that left is neither), and sums and
    numbers of the times to the first token and between tokens, in seconds.
    """

    answered: float = 0.0
    failed: float = 0.0
    first_sum: float = 0.0
    first_count: float = 0.0
    between_sum: float = 0.0
    between_count: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What came on top of `before`; all of it where the pod began anew."""
        began_anew = any(getattr(self, each.name) < getattr(before, each.name) for each in fields(Counters))
        return self if began_anew else self._with(before, -1.0)

    def plus(self, more: Counters) -> Counters:
        """The sum of both."""
        return self._with(more, 1.0)

    def _with(self, other: Counters, sign: float) -> Counters:
        return Counters(*(getattr(self, each.name) + sign * getattr(other, each.name) for each in fields(Counters)))


@dataclass(frozen=True, slots=True)
class Figures:
    """What the pods of one side did. `first_token`: mean seconds; `tokens_per_second` of a stream; None = no sample."""

    requests: int = 0
    failed: int = 0
    first_token: float | None = None
    tokens_per_second: float | None = None

    @property
    def failing(self) -> float:
        """Percent of the requests that failed."""
        return 100.0 * self.failed / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides since then."""

    since: datetime
    stable: Figures
    canary: Figures


@dataclass(slots=True)
class _Round:
    """One comparison under way. `mark` names it; the mappings have each pod's last counters by its uid."""

    mark: str
    since: datetime
    looked: datetime
    last: dict[str, Counters] = field(default_factory=dict)
    sums: tuple[Counters, Counters] = (Counters(), Counters())

    def add(self, side: int, counted: Mapping[str, Counters]) -> None:
        for uid, now in counted.items():
            grown = now.since(self.last.get(uid, now))
            sums = list(self.sums)
            sums[side] = sums[side].plus(grown)
            self.sums = (sums[0], sums[1])
            self.last[uid] = now

    @property
    def result(self) -> Comparison:
        return Comparison(self.since, *map(figures, self.sums))


class Comparisons:
    """The comparisons of all services whose canaries run."""

    def __init__(self) -> None:
        self._rounds: dict[Key, _Round] = {}

    def fresh(self, key: Key, mark: str, now: datetime) -> Comparison | None:
        """What was found a moment ago; None where it is time to look."""
        known = self._rounds.get(key)
        if known is None or known.mark != mark or (now - known.looked).total_seconds() >= FRESH_SECONDS:
            return None
        return known.result

    def note(
        self, key: Key, mark: str, now: datetime, stable: Mapping[str, Counters], canary: Mapping[str, Counters]
    ) -> Comparison:
        """Count what pods say now. Another `mark` begins another comparison."""
        known = self._rounds.get(key)
        if known is None or known.mark != mark:
            known = self._rounds[key] = _Round(mark, now, now)
        known.looked = now
        known.add(0, stable)
        known.add(1, canary)
        return known.result

    def forget(self, key: Key) -> None:
        """Nothing is compared any more."""
        self._rounds.pop(key, None)


def figures(sums: Counters) -> Figures:
    """What sums say."""
    requests = round(sums.answered + sums.failed)
    first = sums.first_sum / sums.first_count if sums.first_count else None
    tokens = sums.between_count / sums.between_sum if sums.between_sum else None
    return Figures(requests, round(sums.failed), first, tokens)


def read_counters(page: str) -> Counters | None:
    """The counters out of a page of metrics; None of a page that has none, or is not in Prometheus' text format."""
    lines = [line for line in page.splitlines() if line.startswith(_SERIES)]
    sums = dict.fromkeys(_SERIES, 0.0)
    failed = 0.0
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason", "")
                if sample.name == _ENDED and reason == "error":
                    failed += sample.value
                elif sample.name in sums and reason != "abort":
                    sums[sample.name] += sample.value
    except ValueError:
        return None
    if not any(line.startswith(_ENDED) for line in lines):
        return None
    times = (sums[name] for name in _SERIES[2:])
    return Counters(sums[_ENDED], failed + sums[_REFUSED], *times)
