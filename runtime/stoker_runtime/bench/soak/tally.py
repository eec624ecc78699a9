"""What a soak counts while it runs: requests by kind and end, gaps between tokens by tenth, memory by second.

Invariants: bounded memory, however long it runs: gaps are counts by size (within 2%), samples one a second, words of
what went wrong a few of each kind and end. All counting happens in one event loop.
Knows nothing of what a request was, and judges nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

TENTHS = 10
KEPT_WORDS = 5
_STEP = math.log(1.02)


class Gaps:
    """Counts of durations, each known to within 2%."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[math.floor(math.log(max(seconds, 1e-6)) / _STEP)] += 1

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self._counts.values())

    def quantile(self, share: float) -> float:
        """Seconds below which a share of them lies; 0 of none."""
        left = share * self.count
        for size in sorted(self._counts):
            left -= self._counts[size]
            if left <= 0:
                return math.exp((size + 1) * _STEP)
        return 0.0

    @staticmethod
    def together(parts: Iterable[Gaps]) -> Gaps:
        """All of several."""
        found = Gaps()
        for part in parts:
            found._counts += part._counts
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one time: seconds of the load, MiB resident in all processes, MiB in use on the device (or None)."""

    at: float
    rss_mib: float
    device_mib: float | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A seeded text that was generated among others, to be generated again alone."""

    body: dict[str, object]
    text: str
    finish: str


@dataclass(slots=True)
class Tally:
    """Everything counted. `ends` has `(kind, end)`, where an end is ok, full (429), or a word of what went wrong.

    `wrong` has the last words of each such pair that is not ok. `gaps` are between tokens, `late` is how much later
    than asked this program itself came to look, both by tenth.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: dict[tuple[str, str], deque[str]] = field(default_factory=dict)
    tokens: int = 0
    most_streams: int = 0
    gaps: list[Gaps] = field(default_factory=lambda: [Gaps() for _ in range(TENTHS)])
    late: list[Gaps] = field(default_factory=lambda: [Gaps() for _ in range(TENTHS)])
    samples: list[Sample] = field(default_factory=list)
    texts: list[Sampled] = field(default_factory=list)

    def ended(self, kind: str, end: str, words: str = "") -> None:
        """Count one request of `kind`; `words` say what was wrong with it."""
        self.ends[kind, end] += 1
        if words:
            self.wrong.setdefault((kind, end), deque(maxlen=KEPT_WORDS)).append(f"{end}: {words}")

    @property
    def requests(self) -> int:
        """How many ended."""
        return self.ends.total()

    def count(self, end: str) -> int:
        """How many ended so."""
        return sum(count for (_, each), count in self.ends.items() if each == end)
