"""judge.py: what is good enough, what is not, and when nobody can tell yet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from stoker_operator.observe.comparison import Comparison, Figures
from stoker_operator.plan.canary.judge import BAD, EARLY, FEW, GOOD, judge
from stoker_operator.spec.service import InferenceService

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
FINE = Figures(400, 2, 0.2, 50.0)
CASES: dict[str, tuple[int, Figures, Figures, str]] = {
    # name: (seconds, stable, canary, verdict)
    "as good": (300, FINE, Figures(61, 0, 0.29, 41.0), GOOD),
    "the window is not over": (299, FINE, Figures(61, 0, 0.9, 1.0), EARLY),
    "nobody asked it": (90000, FINE, Figures(), FEW),
    "too few of it": (90000, FINE, Figures(59, 0, 9.0, 1.0), FEW),
    "too few to compare with": (90000, Figures(59), Figures(61, 0, 9.0, 1.0), FEW),
    "no samples of time": (300, Figures(400), Figures(61, 0, 9.0, 1.0), GOOD),
    "three failures are enough at once": (1, FINE, Figures(10, 3), BAD),
    "two may be chance": (1, FINE, Figures(10, 2), EARLY),
    "it fails as the stable one does": (1, Figures(400, 120), Figures(10, 3), EARLY),
    "a little too often": (300, Figures(400, 2), Figures(100, 4, 0.2), BAD),
    "within the tolerance": (300, Figures(400, 4), Figures(100, 3, 0.2), GOOD),
    "failures are judged where the stable one is idle": (300, Figures(), Figures(61, 61), BAD),
    "its first token is late": (300, FINE, Figures(61, 0, 0.31, 50.0), BAD),
    "a few milliseconds nobody notices": (300, Figures(400, 0, 0.01), Figures(61, 0, 0.029), GOOD),
    "its streams are slow": (300, FINE, Figures(61, 0, 0.2, 39.0), BAD),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_verdict(service: Callable[..., InferenceService], case: tuple[int, Figures, Figures, str]) -> None:
    seconds, stable, other, kind = case
    asked = service(canary={"weight": 5, "requests": 60, "tolerance": {"errors": 2}, "model": {"revision": "v2"}})
    assert asked.canary is not None
    found = judge(Comparison(NOW - timedelta(seconds=seconds), stable, other), asked.canary, NOW)
    assert (found.kind, bool(found.why)) == (kind, kind == BAD)


def test_it_says_what_was_worse(service: Callable[..., InferenceService]) -> None:
    canary = service(canary={"weight": 5, "requests": 7, "model": {"revision": "v2"}}).canary
    assert canary is not None
    since = NOW - timedelta(hours=1)
    said = judge(Comparison(since, FINE, Figures(8, 2)), canary, NOW).why
    assert said == "2 of its 8 requests failed (25.0 %), of the stable revision's 0.5 %"
    said = judge(Comparison(since, FINE, Figures(8, 0, 0.2, 12.345)), canary, NOW).why
    assert said == "its streams had 12.3 tokens a second, the stable revision's 50"
