"""words.py: which step a start has reached, how long it still takes, and what Ready says meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator.manifests.activation import ASLEEP, WAKING, Sleep
from stoker_operator.plan.actions import Finding
from stoker_operator.plan.sleep.words import brief, eta_seconds, sleep_finding, start_seconds, waking_step

NOW = datetime(2026, 1, 1, 12, 0, 9, tzinfo=UTC)
SINCE = "2026-01-01T12:00:00Z"
UNSCHEDULED = {"conditions": [{"type": "PodScheduled", "status": "False", "message": ""}]}
RUNS = {"state": {"running": {"startedAt": SINCE}}}


def pending(**statuses: Any) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "True"}], **statuses}


STEPS: dict[str, list[dict[str, Any]]] = {
    "its pod is being made": [],
    "a pod waits for a node": [UNSCHEDULED],
    "a node makes the pod's containers": [UNSCHEDULED, pending()],
    "the weights are checked": [pending(initContainerStatuses=[{"name": "verify"} | RUNS])],
    "the engine loads the model": [pending(containerStatuses=[{"name": "engine"} | RUNS]), pending()],
}


@pytest.mark.parametrize("step", STEPS)
def test_the_step_is_that_of_the_pod_furthest_on_its_way(world: Any, step: str) -> None:
    there = world()
    for status in STEPS[step]:
        there.pod(**status)
    assert waking_step(there.observed()) == step


def test_a_start_takes_as_long_as_the_one_before(world: Any) -> None:
    there = world()
    sleep = Sleep(WAKING, "nap", SINCE, "POST /v1/rerank")
    assert (start_seconds(there.service), eta_seconds(there.service, sleep, NOW)) == (60, 51)
    there.service.status["startup"] = {"scheduleSeconds": 1, "fetchSeconds": 700, "verifySeconds": 2, "loadSeconds": 14}
    assert (start_seconds(there.service), eta_seconds(there.service, sleep, NOW)) == (18, 9)
    assert eta_seconds(there.service, sleep, NOW + timedelta(minutes=1)) == 0


@pytest.mark.parametrize(
    ("state", "blocking", "reason", "words"),
    [
        (ASLEEP, "ScaledToZero", "Asleep", ["nobody asked", "kubectl stoker wake demo", SINCE]),
        (ASLEEP, "Fetching", "Fetching", []),
        (WAKING, "PodsStarting", "Waking", ["nobody asked", "its pod is being made", "about 51 s to go"]),
        (WAKING, "CrashLoop", "CrashLoop", []),
        (WAKING, "Unschedulable", "Unschedulable", []),
    ],
)
def test_ready_says_why_there_are_no_pods_unless_they_have_trouble(
    world: Any, state: str, blocking: str, reason: str, words: list[str]
) -> None:
    there = world()
    sleep = Sleep(state, "nap", SINCE, "nobody asked")
    found = sleep_finding(there.service, there.observed(), sleep, Finding(blocking, "x"), NOW)
    assert found is not None
    assert found.reason == reason
    for word in words:
        assert word in found.message
    assert sleep_finding(there.service, there.observed(), sleep, None, NOW) is None


@pytest.mark.parametrize(("seconds", "text"), [(45, "45s"), (90, "90s"), (420, "7m"), (7200, "2h")])
def test_durations_are_said_as_a_spec_says_them(seconds: int, text: str) -> None:
    assert brief(seconds) == text
