"""plugin/screen.py and logs.py: what is shown of a service in each situation, and which logs matter then."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator.plugin.logs import choose, is_noise
from stoker_operator.plugin.place import Log
from stoker_operator.plugin.screen import overview, screen

Object = dict[str, Any]
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def ago(**span: int) -> str:
    return (NOW - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def seen(raw: Callable[..., Object], reason: str, message: str = "So it is.", **status: Any) -> Object:
    """A service whose Ready has this reason."""
    service = raw("some")
    service["metadata"] |= {"creationTimestamp": ago(days=2), "generation": 3}
    ready = "True" if reason == "Serving" else "False"
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    condition |= {"lastTransitionTime": ago(hours=5, minutes=7)}
    service["status"] = {"observedGeneration": 3, "conditions": [condition]} | status
    return service


def pod(name: str, part: str = "engine", age: int = 60, **status: Any) -> Object:
    meta = {"name": name, "creationTimestamp": ago(seconds=age), "labels": {"app.kubernetes.io/component": part}}
    return {"metadata": meta, "spec": {}, "status": {"phase": "Running"} | status}


def container(name: str, restarts: int = 0, *, last: Object | None = None, **state: Any) -> Object:
    return {"name": name, "restartCount": restarts, "state": state, "lastState": {"terminated": last} if last else {}}


RUNS = {"containerStatuses": [container("engine", running={})]}


def test_groups_that_were_made_anew_are_told_with_their_cause(raw: Callable[..., Object]) -> None:
    steady = {"index": 0, "revision": "r", "since": ago(days=1), "leader": "a"}
    anew = steady | {"index": 4, "restarts": 2, "restarted": ago(minutes=6), "why": "pod x-nodes-4-1 was deleted"}
    service = seen(raw, "Serving", groups=[steady, anew], scaling={"desired": 5})
    text = "\n".join(screen(service, [], [], NOW))
    assert f"groups     4 was made anew 2 times, last at {ago(minutes=6)}: pod x-nodes-4-1 was deleted" in text
    assert "scaling    5 groups wanted" in text


def test_logs_are_of_workers_too(raw: Callable[..., Object]) -> None:
    """The leader's first, which has the API's; where a worker ended, its last words."""
    pods = [pod("w", "worker", age=5, **RUNS), pod("l", age=9, **RUNS)]
    assert choose(seen(raw, "Serving"), pods) == [Log("l", "engine"), Log("w", "engine")]
    died = {"containerStatuses": [container("engine", 1, last={"exitCode": 1}, running={})]}
    pods = [pod("w", "worker", **died), pod("l", **RUNS)]
    assert choose(seen(raw, "GroupRestarting"), pods) == [Log("w", "engine", previous=True)]


def test_the_screen_says_what_since_when_and_what_to_do(raw: Callable[..., Object]) -> None:
    cache = {"progress": "25%", "claim": "models-1", "etaSeconds": 77}
    service = seen(raw, "TokenRejected", "The hub wants a token.", cache=cache)
    events = [
        {"reason": "Fetching", "message": "a", "lastTimestamp": ago(hours=1)},
        {"reason": "TokenRejected", "message": "b " * 200, "lastTimestamp": ago(minutes=3, seconds=20)},
    ]
    lines = list(screen(service, [], events, NOW))
    text = "\n".join(lines)
    assert lines[0] == "default/some  not ready: TokenRejected"
    assert "The hub wants a token." in text
    assert f"since      3m20s ago ({ago(minutes=3, seconds=20)})" in text
    assert "to do      put a token, or keys, with access into the Secret of spec.model.secretRef" in text
    assert "cache      25% on volume models-1, about 77 s to go" in text
    assert "no pods" in text
    assert max(map(len, lines)) <= 118
    assert len(lines) <= 24


def test_each_adapter_has_a_line(raw: Callable[..., Object]) -> None:
    loaded = {"name": "team/sql", "state": "Loaded", "pods": 2, "revision": "0123456789abcdef", "message": "Fine."}
    refused = {"name": "law", "state": "Refused", "pods": 0, "message": "Pod p does not serve it: its rank is 99."}
    text = "\n".join(screen(seen(raw, "Serving", adapters=[loaded, refused]), [], [], NOW))
    assert "adapters   team/sql at 0123456789ab: Loaded, in 2 pods\n" in text
    assert "           law: Refused, in 0 pods. Pod p does not serve it: its rank is 99.\n" in text


def test_without_an_event_the_conditions_time_counts(raw: Callable[..., Object]) -> None:
    text = "\n".join(screen(seen(raw, "Serving"), [pod("p", **RUNS)], [], NOW, "http://here:1/v1"))
    assert "default/some  Ready" in text
    assert "since      5h7m ago" in text
    assert "kubectl stoker chat some" in text
    assert "url        http://here:1/v1" in text


def test_a_service_that_no_operator_saw(raw: Callable[..., Object]) -> None:
    service = seen(raw, "Serving")
    del service["status"]
    text = "\n".join(screen(service, [], [], NOW))
    assert "not ready: not seen yet" in text
    assert "see whether the operator runs" in text


def test_a_newer_spec_and_what_is_degraded_are_said(raw: Callable[..., Object]) -> None:
    service = seen(raw, "Serving", observedGeneration=2)
    service["status"]["conditions"].append({"type": "Degraded", "status": "True", "reason": "x", "message": "Bad key."})
    text = "\n".join(screen(service, [], [], NOW))
    assert "(a newer spec was not looked at yet)" in text
    assert "degraded   Bad key." in text


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (pod("p", conditions=[{"type": "Ready", "status": "True"}], **RUNS), "Ready"),
        (pod("p", **RUNS), "runs engine"),
        (pod("p", containerStatuses=[container("engine", waiting={"reason": "ErrImagePull"})]), "ErrImagePull"),
        (pod("p", phase="Pending"), "Pending"),
    ],
)
def test_a_pods_state_is_one_word(raw: Callable[..., Object], found: Object, state: str) -> None:
    line = next(line for line in screen(seen(raw, "RollingOut"), [found], [], NOW) if line.startswith("p "))
    assert state in line
    assert line.endswith("1m")


def test_all_services_take_a_line_each(raw: Callable[..., Object]) -> None:
    lines = list(overview([seen(raw, "Serving", replicas=2, readyReplicas=2), seen(raw, "DoesNotFit")], NOW))
    assert lines[0].split() == ["NAME", "READY", "REASON", "PODS", "AGE", "TO", "DO"]
    assert lines[1].split() == ["some", "True", "Serving", "2/2", "2d"]
    assert lines[2].endswith("compare GPUs: kubectl stoker fit some")


ENDED = {"exitCode": 1}
CRASHED = {"containerStatuses": [container("engine", 4, last=ENDED, waiting={"reason": "x"})]}
BOTH = [Log("b", "engine"), Log("a", "engine")]


@pytest.mark.parametrize(
    ("reason", "pods", "logs"),
    [
        ("Fetching", [pod("old", "fetch", 90), pod("new", "fetch", 9)], [Log("new", "fetch")]),
        ("ModelNotFound", [pod("f", "fetch", phase="Failed")], [Log("f", "fetch")]),
        ("Serving", [pod("f", "fetch"), pod("a", **RUNS), pod("b", **RUNS, age=5)], BOTH),
        (
            "CrashLoop",
            [pod("a", **RUNS), pod("b", **CRASHED)],
            [Log("b", "engine", previous=True)],
        ),
        (
            "RollingOut",
            [pod("a", initContainerStatuses=[container("verify", terminated=ENDED)])],
            [Log("a", "verify")],
        ),
        ("RollingOut", [pod("a", containerStatuses=[container("engine", waiting={"reason": "PodInitializing"})])], []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_logs_that_matter(raw: Callable[..., Object], reason: str, pods: list[Object], logs: list[Log]) -> None:
    assert choose(seen(raw, reason), pods) == logs


def test_probes_are_noise_and_requests_are_not() -> None:
    assert is_noise('127.0.0.1 "GET /health HTTP/1.1" 200')
    assert is_noise("GET /metrics 200 0.001 s")
    assert not is_noise('"POST /v1/chat/completions HTTP/1.1" 200')
    assert not is_noise("GET /v1/models 200")
