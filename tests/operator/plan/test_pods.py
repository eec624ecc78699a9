"""plan/pods.py and conditions.py: what is said of pods whose revision was rolled out, and of those on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stoker_operator.plan.actions import Condition

Object = dict[str, Any]
STARTED = {"running": {"startedAt": "2026-01-01T12:00:00Z"}}
MISMATCH = json.dumps({"reason": "ChecksumMismatch", "message": "m.gguf differs"})


def container(name: str = "engine", *, restarts: int = 0, **status: Any) -> Object:
    return {"name": name, "ready": False, "restartCount": restarts, "state": STARTED} | status


def ended(code: int, message: str = "") -> Object:
    times = {"startedAt": "2026-01-01T10:00:00Z", "finishedAt": "2026-01-01T11:00:00Z"}
    return {"terminated": {"exitCode": code, "message": message} | times}


def unready(since: str) -> list[Object]:
    return [{"type": "Ready", "status": "False", "lastTransitionTime": since}]


KILLED = {"containerStatuses": [container(restarts=1, lastState=ended(1, "EngineDeadError: signal 9"))]}
HUNG = {"containerStatuses": [container()], "conditions": unready("2026-01-01T13:00:00Z")}
LOOPING = {
    "containerStatuses": [
        container(restarts=4, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended(2, "no"))
    ]
}
REPAIRED = {
    "initContainerStatuses": [
        container("verify", state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended(3, MISMATCH))
    ]
}
NO_GPU = [{"type": "PodScheduled", "status": "False", "message": "1 Insufficient nvidia.com/gpu."}]


def leaving(there: Any, template: str = "new") -> Any:
    labels = {"pod-template-hash": template}
    holding = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    metadata = {"name": "gone", "labels": labels, "deletionTimestamp": "t"}
    there.pods.append({"metadata": metadata, "spec": holding, "status": {}})
    return there


def asked(there: Any, replicas: int) -> Any:
    """The spec asks for so many pods, the Deployment does not yet."""
    there.service = replace(there.service, replicas=replicas)
    return there


def current(there: Any, template: str) -> Any:
    """The Deployment rolls another revision out."""
    there.current = template
    return there


def newer(there: Any) -> Any:
    """The Deployment's controller has not seen its newest generation."""
    there.children["Deployment", "demo"]["metadata"]["generation"] = 2
    return there


# name: (what is there with 2 pods wanted of a revision that was rolled out, Ready's reason, what its message says,
#        Servable, Degraded, Progressing)
ROLLED_OUT: dict[str, tuple[Callable[[Any], Any], str, str, str, str, str]] = {
    "engine killed": (
        lambda w: w.pod().pod(ready=False, **KILLED),
        "PodRestarting",
        "Pod p1, container engine ended with exit code 1: EngineDeadError: signal 9. The container starts again",
        "True", "True", "False",
    ),
    "both killed": (
        lambda w: w.pod(ready=False, **KILLED).pod(ready=False, **KILLED), "PodRestarting", "exit code 1",
        "False", "True", "False",
    ),
    "hangs": (
        lambda w: w.pod().pod(ready=False, **HUNG), "PodNotReady", "Pod p1 was ready and is not any more",
        "True", "True", "False",
    ),
    "crash loop": (
        lambda w: w.pod(ready=False, **LOOPING), "CrashLoop", "ended 4 times", "False", "True", "False"
    ),
    "cache repaired": (
        lambda w: w.pod().pod(ready=False, **REPAIRED), "PodRestarting", "The cache is repaired; its pod goes on",
        "True", "True", "False",
    ),
    "a pod was deleted": (
        lambda w: leaving(w.pod().pod(ready=False)),
        "PodsStarting",
        "1 of 2 pods of revision new are ready; 1 is on the way out; the revision is rolled out, and what is missing "
        "starts.",
        "True", "False", "True",
    ),
    "a pod was deleted, its GPU is not free": (
        lambda w: leaving(w.pod().pod(ready=False, phase="Pending", conditions=NO_GPU)),
        "PodsStarting", "1 pod on the way out holds its GPU until it is gone", "True", "True", "False",
    ),
    "more are asked for": (
        lambda w: asked(w.pod().pod(), 3), "PodsStarting", "3 pods of revision new were just asked for.",
        "True", "False", "True",
    ),
    "fewer are asked for": (
        lambda w: asked(w.pod().pod(), 1), "PodsStopping", "1 pod of revision new were just asked for; 2 pods run.",
        "True", "False", "True",
    ),
    "more, not taken up": (
        lambda w: newer(w.pod()), "PodsStarting", "has not taken it up yet", "True", "False", "True"
    ),
    "fewer, not gone yet": (
        lambda w: w.pod().pod().pod(), "PodsStopping", "1 more than asked for.", "True", "False", "True"
    ),
    "another revision": (
        lambda w: current(w.pod(), "newer").pod("newer", ready=False),
        "RollingOut", "1 of an older revision still runs", "True", "False", "True",
    ),
    "another revision that crashes": (
        lambda w: current(w.pod(), "newer").pod("newer", ready=False, **KILLED),
        "PodRestarting", "Pod p1", "True", "False", "True",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pods", "ready", "servable"), [(1, "False", "False"), (2, "True", "True")])
def test_who_does_not_answer_is_not_ready_whatever_is_said(world: Any, pods: int, ready: str, servable: str) -> None:
    there = world(autoscaling={"min": 1, "max": 4}).pod()
    for _ in range(1, pods):
        there.pod()
    there.children["Deployment", "demo"]["spec"]["replicas"] = pods
    remember(there)
    there.silent = frozenset({"p0"})
    found = {item.type: item for item in there.plan().conditions}
    assert (found["Ready"].status, found["Servable"].status) == (ready, servable)
    assert found["EndpointReady"].status == servable
    told = found["Ready"] if ready == "False" else found["Degraded"]
    assert told.reason == "PodNotReady"
    assert "Pod p0 is said to be ready and does not answer: node n1 may have stopped reporting" in told.message


def test_a_node_that_pulls_the_models_image_is_told(world: Any) -> None:
    made = [{"type": "PodReadyToStartContainers", "status": "True"}, {"type": "Ready", "status": "False"}]
    waits = {"containerStatuses": [container(state={"waiting": {"reason": "ContainerCreating"}})], "conditions": made}
    for volumes, told in (([{"name": "models", "image": {"reference": "r.io/m@sha256:1"}}], True), ([], False)):
        there = world().pod().pod(ready=False, phase="Pending", **waits)
        there.pods[-1]["spec"]["volumes"] = volumes
        ready = next(item for item in there.plan().conditions if item.type == "Ready")
        assert ("1 pod waits for the model's image to be pulled" in ready.message) is told


def test_what_a_pod_that_serves_warns_of_is_told(world: Any) -> None:
    there = world().pod()
    remember(there)
    there.warnings = {"p0": "The file of API keys holds none. The keys that were valid stay valid."}
    found = {item.type: item for item in there.plan().conditions}
    assert (found["Ready"].status, found["Degraded"].status, found["Degraded"].reason) == ("True", "True", "PodWarns")
    assert found["Degraded"].message.startswith("Pod p0 serves and says: The file of API keys holds none.")


@pytest.mark.parametrize("keys", [{"auth": {"apiKeysSecretRef": {"name": "team-keys", "key": "all"}}}, {}], ids=str)
def test_keys_that_a_node_cannot_read_any_more_are_told(world: Any, keys: dict[str, Any]) -> None:
    there = world(endpoint=keys).pod()
    remember(there)
    there.unmounted = {there.pods[0]["metadata"]["uid"]: 'secret "team-keys" not found'}
    found = {item.type: item for item in there.plan().conditions}
    assert found["Ready"].status == "True"
    assert (found["Degraded"].status, found["Degraded"].reason) == (
        ("True", "PodWarns") if keys else ("False", "NoTrouble")
    )
    if keys:
        assert 'cannot read Secret team-keys any more (secret "team-keys" not found)' in found["Degraded"].message
        assert "with a key all" in found["Degraded"].message


@pytest.mark.parametrize("case", ROLLED_OUT.values(), ids=ROLLED_OUT)
def test_what_happens_after_a_rollout_is_no_rollout(
    world: Any, case: tuple[Callable[[Any], Any], str, str, str, str, str]
) -> None:
    arrange, reason, says, *states = case
    there = world(replicas=2)
    remember(there)
    plan = arrange(there).plan()
    found = {item.type: item for item in plan.conditions}
    assert (found["Ready"].status, found["Ready"].reason) == ("False", reason)
    assert says in found["Ready"].message
    assert [found[kind].status for kind in ("Servable", "Degraded", "Progressing")] == states
    assert found["Degraded"].status == "False" or found["Degraded"].reason == reason
    assert plan.requeue_after is not None


def remember(there: Any) -> None:
    revisions = {"current": "new", "answered": "new", "rolledOut": "new"}
    published = {"type": "ModelCached", "status": "True", "lastTransitionTime": "2026-01-01T11:30:00Z"}
    status = {"revisions": revisions, "conditions": [published]}
    there.service = replace(there.service, status=there.service.status | status)


def test_a_first_rollout_is_not_degraded(world: Any) -> None:
    found = conditions(world().pod(ready=False, **LOOPING))
    assert (found["Ready"].reason, found["Degraded"].status, found["Progressing"].status) == (
        "CrashLoop",
        "False",
        "False",
    )
    found = conditions(world().pod(ready=False))
    assert (found["Ready"].reason, found["Degraded"].status, found["Progressing"].status) == (
        "RollingOut",
        "False",
        "True",
    )


def test_rolled_out_is_remembered_until_another_revision_is_current(world: Any) -> None:
    there = world().pod()
    assert there.plan().rolled_out == ""  # ready, but nobody asked it yet
    there.answered()
    assert there.plan().rolled_out == "new"
    there.service, there.answer = replace(there.service, status=there.status()), None
    there.pods.clear()
    assert there.plan().rolled_out == "new"
    newer(there)
    assert there.plan().rolled_out == "new"  # unknown which one is current
    there.children["Deployment", "demo"]["metadata"]["generation"] = 1
    there.current = "newer"
    assert there.plan().rolled_out == ""


def test_a_pod_beyond_those_that_are_needed_restarts_and_degrades_nothing_but_itself(world: Any) -> None:
    there = world(autoscaling={"max": 4}).pod().pod(ready=False, **KILLED).answered()
    there.children["Deployment", "demo"]["spec"]["replicas"] = 2
    remember(there)
    found = conditions(there)
    assert (found["Ready"].status, found["Ready"].reason) == ("True", "Serving")
    assert (found["Degraded"].status, found["Degraded"].reason) == ("True", "PodRestarting")
    assert found["Progressing"].status == "False"


def test_serving_is_settled(world: Any) -> None:
    found = conditions(world().pod().answered())
    assert [found[kind].status for kind in ("Ready", "Degraded", "Progressing")] == ["True", "False", "False"]


def conditions(there: Any) -> dict[str, Condition]:
    return {item.type: item for item in there.plan().conditions}
