"""pace.py: what moves is looked at often, what stands still rarely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from stoker_operator.cluster.api import DISCOVERY_SECONDS
from stoker_operator.observe.snapshot import Observed, Progress
from stoker_operator.plan.actions import Finding
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.pace import KIND_SECONDS, look_again
from stoker_operator.spec.service import InferenceService

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
MOVING = Observed(progress=Progress("download", 1, 9, 4))
CASES: dict[str, tuple[str, CachePlan, Observed, float, float | None]] = {
    # name: (Ready's reason, the cache, what was observed, seconds since it was ready, when it is looked at again)
    "a crash loop, just now": ("CrashLoop", CachePlan("c"), Observed(), 20, 15),
    "a crash loop for ten minutes": ("CrashLoop", CachePlan("c"), Observed(), 600, 60),
    "a crash loop for a day": ("CrashLoop", CachePlan("c"), Observed(), 86400, 330),
    "a prefetch that hangs": ("ImagePullFailed", CachePlan("c", requeue_after=10), Observed(), 3000, 300),
    "what is due and not looked at for long": ("CrashLoop", CachePlan("c", verify_after=40), Observed(), 86400, 40),
    "a long download": ("Fetching", CachePlan("c", requeue_after=30), MOVING, 7200, 30),
    "the next try is due": ("TokenRejected", CachePlan("c", requeue_after=7, exact=True), Observed(), 7200, 7),
    "no answer for long": ("NoAnswer", CachePlan("c"), Observed(), 7200, 30),
    "no answer yet": ("NoAnswer", CachePlan("c"), Observed(), 3, 5),
    "idle pods are awaited": ("WaitingForIdle", CachePlan("c"), Observed(), 7200, 5),
    "asleep": ("Suspended", CachePlan("c"), Observed(), 7200, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pace(
    service: Callable[..., InferenceService], case: tuple[str, CachePlan, Observed, float, float | None]
) -> None:
    reason, cache, observed, age, expected = case
    since = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    there = replace(service(), status={"conditions": [unready]})
    assert look_again(there, observed, cache, Finding(reason, "m"), NOW) == expected


def test_at_rest_events_tell(service: Callable[..., InferenceService]) -> None:
    assert look_again(service(), Observed(), CachePlan("c"), None, NOW) is None
    assert look_again(service(), Observed(), CachePlan("c"), Finding("Unschedulable", "m"), NOW) == 15


LACKING: dict[str, tuple[dict[str, object], str]] = {
    # name: (what the spec asks for, the kind that it takes)
    "a pool": ({"endpoint": {"inferencePool": {"endpointPickerRef": {"name": "epp"}}}}, "InferencePool"),
    "a route": ({"endpoint": {"httpRoute": {"parentRefs": [{"name": "gw"}]}}}, "HTTPRoute"),
    "KEDA": ({"autoscaling": {"engine": "KEDA", "min": 1, "max": 3}}, "ScaledObject"),
}


@pytest.mark.parametrize("case", LACKING.values(), ids=LACKING)
def test_nothing_tells_of_a_kind_that_comes(
    service: Callable[..., InferenceService], case: tuple[dict[str, object], str]
) -> None:
    """One that was installed just before the service was not known yet, and the service at rest had no other look."""
    spec, kind = case
    there = service(**spec)
    assert look_again(there, Observed(), CachePlan("c"), None, NOW) == KIND_SECONDS > DISCOVERY_SECONDS
    assert look_again(there, Observed(), CachePlan("c", verify_after=7), None, NOW) == 7
    assert look_again(there, Observed(served=frozenset({kind})), CachePlan("c"), None, NOW) is None
    assert look_again(there, Observed(without=frozenset({kind})), CachePlan("c"), None, NOW) is None
