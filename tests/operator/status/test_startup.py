"""startup.py: the phases of a start, from the times that Kubernetes keeps; measured once for a revision."""

from __future__ import annotations

from typing import Any

from stoker_operator.manifests.identity import SOURCE_LABEL
from stoker_operator.observe.snapshot import Observed
from stoker_operator.status.startup import startup

Object = dict[str, Any]


def at(second: int) -> str:
    return f"2026-01-01T12:{second // 60:02}:{second % 60:02}Z"


def pod(created: int = 0, *, template: str = "new", ready: bool = True, **status: Any) -> Object:
    engine = {"name": "engine", "state": {"running": {"startedAt": at(created + 9)}}}
    verify = {"name": "verify", "state": {"terminated": {"startedAt": at(created + 4), "finishedAt": at(created + 8)}}}
    found: Object = {
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(created + 3)},
            {"type": "Ready", "status": str(ready), "lastTransitionTime": at(created + 40)},
        ],
        "containerStatuses": [engine],
        "initContainerStatuses": [verify],
    }
    labels = {"pod-template-hash": template}
    return {"metadata": {"labels": labels, "creationTimestamp": at(created)}, "status": found | status}


def fetched(source: str = "s", code: int = 0, start: int = 0, end: int = 0) -> Object:
    ended = {"exitCode": code, "startedAt": at(start), "finishedAt": at(end)}
    containers = [{"name": "fetch", "state": {"terminated": ended}}]
    return {"metadata": {"labels": {SOURCE_LABEL: source}}, "status": {"containerStatuses": containers}}


MEASURED = {"revision": "new", "scheduleSeconds": 3, "verifySeconds": 4, "loadSeconds": 31}


def test_the_first_ready_pod_of_the_revision_is_measured() -> None:
    pods = (pod(5), pod(0), pod(0, template="old"), pod(0, ready=False))
    # Of the try that came through, from when its container ran: what it waited for is no fetching.
    tries = (fetched("other", end=9), fetched(code=1, end=40), fetched(start=50, end=70))
    seen = Observed(engine_pods=pods, fetch_pods=tries)
    assert startup({}, seen, "new", "s") == MEASURED | {"fetchSeconds": 20}


def test_a_phase_that_nobody_timed_is_left_out() -> None:
    assert startup({}, Observed(engine_pods=(pod(),)), "new", "s") == MEASURED
    bare = pod(containerStatuses=[], initContainerStatuses=[])
    assert startup({}, Observed(engine_pods=(bare,)), "new", "s") == {"revision": "new", "scheduleSeconds": 3}


def test_a_revision_is_measured_once() -> None:
    later = Observed(engine_pods=(pod(100, conditions=[]), pod(50)))
    assert startup(MEASURED, later, "new", "s") == MEASURED
    assert startup(MEASURED, later, "", "s") == MEASURED
    assert startup(MEASURED, Observed(), "newer", "s") == MEASURED
