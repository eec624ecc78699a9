"""Scenario 6, the operator: killed at each step of a first rollout and of an update; the other replica goes on.

The steps of an update have one service among them: each is a change of its own, and leaves the service ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.scenarios import golden, stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.faults.test_source_faults import seen
from e2e.scenarios.kube import Kube, eventually

GOLDEN = Path(__file__).parent / "golden"
GOES_ON = "the other replica leads and goes on"


def kill_leader(installed: Kube) -> None:
    """End the operator's leader as a node's death would."""
    leader = installed.get("lease", "stoker")["spec"]["holderIdentity"]
    installed.kubectl("delete", "pod", leader, "--force", "--grace-period=0")


def wait_whole(installed: Kube) -> None:
    """Until both of the operator's replicas are back."""
    installed.kubectl("rollout", "status", "deployment/stoker", "--timeout=120s")


def _kind_exists(kind: str) -> Callable[[Kube], bool]:
    return lambda kube: bool(kube.items(kind))


def _pod_ready(kube: Kube) -> bool:
    conditions = [item for pod in stoker.engine_pods(kube, "model") for item in pod["status"].get("conditions", ())]
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


FIRST: dict[str, Callable[[Kube], bool]] = {
    "the claim is made": _kind_exists("persistentvolumeclaims"),
    "the fetch runs": _kind_exists("jobs"),
    "the Deployment is made": _kind_exists("deployments"),
    "a pod is ready": _pod_ready,
}


IN_CI = pytest.param("the fetch runs", marks=pytest.mark.ci)


@pytest.mark.parametrize("step", [IN_CI if step in IN_CI.values else step for step in FIRST])
def test_first_rollout(place: Kube, installed: Kube, record: Record, step: str) -> None:
    place.apply(stoker.service("model"))
    eventually(step, lambda: FIRST[step](place), 120, every=0.1)
    watch = stoker.Stopwatch()
    kill_leader(installed)
    stoker.wait_ready(place, "model")
    jobs = place.items("jobs")
    assert len(jobs) == 1, f"the new leader fetched again: {[job['metadata']['name'] for job in jobs]}"
    wait_whole(installed)
    record.add(Fault(f"operator killed when {step}", GOES_ON, watch.seconds))


@dataclass(frozen=True)
class Step:
    """A change of a service that serves, the moment of it at which the operator is killed, and what comes of it."""

    change: dict[str, Any]
    moment: Callable[[Kube, str], bool]
    ends: str = "Serving"


def _new_set(kube: Kube, old: str) -> bool:
    return any(item["metadata"]["labels"]["pod-template-hash"] != old for item in kube.items("replicasets"))


def _new_pod_starts(kube: Kube, old: str) -> bool:
    return any(pod["metadata"]["labels"]["pod-template-hash"] != old for pod in stoker.engine_pods(kube, "model"))


def _old_pod_terminates(kube: Kube, old: str) -> bool:
    pods = kube.items("pods", f"pod-template-hash={old}")
    return any("deletionTimestamp" in pod["metadata"] for pod in pods)


def _crashes(kube: Kube, _: str) -> bool:
    return bool(stoker.conditions(kube, "model")["Ready"]["reason"] == "CrashLoop")


def _given_up(kube: Kube, _: str) -> bool:
    return any("stoker.dev/failed" in item["metadata"]["annotations"] for item in kube.items("controllerrevisions"))


def _seeded(seed: int, **spec: Any) -> dict[str, Any]:
    return {"runtime": {"args": ["--seed", str(seed)]}, **spec}


IN_PLACE = {"strategy": "RollingUpdate", "maxSurge": 0, "maxUnavailable": 1}
ONE_MORE = {"strategy": "Auto", "maxSurge": None, "maxUnavailable": None, "progressDeadline": "30s"}
# What only the engine can find out: a typo in a flag's name is refused before a pod is made.
BAD = {"runtime": {"args": ["--tokenizer", "/no/such/tokenizer"]}, "rollout": ONE_MORE}
# In this order: the last ones come to nothing, and leave the revision before.
UPDATE = {
    "a new ReplicaSet is made": Step(_seeded(1), _new_set),
    "the new pod is not ready": Step(_seeded(2), _new_pod_starts),
    "an old pod is on the way out": Step(_seeded(3), _old_pod_terminates),
    "it goes in place": Step(_seeded(4, rollout=IN_PLACE), _old_pod_terminates),
    "the new revision crashes": Step(BAD, _crashes, "RolledBack"),
    "it is rolled back": Step(BAD, _given_up, "RolledBack"),
}


@pytest.fixture(scope="module")
def updated(kube: Kube, installed: Kube) -> Iterator[Kube]:
    """A namespace with one service that serves, for all steps of an update."""
    with stoker.namespace(kube, "operator-killed-in-updates") as made:
        made.apply(stoker.service("model"))
        stoker.wait_ready(made, "model")
        yield made


@pytest.mark.parametrize("name", UPDATE)
def test_update(updated: Kube, installed: Kube, record: Record, name: str) -> None:
    step, old = UPDATE[name], updated.get("infsvc", "model")["status"]["revisions"]["current"]
    pods = {pod["metadata"]["uid"] for pod in stoker.engine_pods(updated, "model")}
    updated.merge("infsvc", "model", {"spec": step.change})
    eventually(name, lambda: step.moment(updated, old), 120, every=0.1)
    if step.moment is _crashes:
        golden.check(GOLDEN / "crash-loop.txt", golden.situation(updated, "model"))
    watch = stoker.Stopwatch()
    kill_leader(installed)
    if step.ends == "Serving":
        stoker.wait_ready(updated, "model")
        current = updated.get("infsvc", "model")["status"]["revisions"]["current"]
        assert current != old
        eventually("no old pod is left", lambda: not updated.items("pods", f"pod-template-hash={old}"), 180)
        record.add(Fault(f"operator killed in an update when {name}", GOES_ON, watch.seconds))
    else:
        condition = stoker.wait_reason(updated, "model", "RolledBack")
        stoker.ask(stoker.url(updated, "model"), "model")
        eventually("only the old pods are left", lambda: settled(updated) and uids(updated) == pods, 120)
        seconds = watch.seconds
        golden.check(GOLDEN / "rolled-back.txt", golden.situation(updated, "model"))
        assert updated.get("infsvc", "model")["status"]["revisions"]["current"] == old
        record.add(Fault(f"operator killed in an update when {name}", seen(condition), seconds))
        correct(updated)
    assert len(updated.items("jobs")) <= 1, "the new leader fetched again"
    wait_whole(installed)


def correct(kube: Kube) -> None:
    """Ask for the revision that serves again, and forget that another failed: the next step tries the same one."""
    kube.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--seed", "4"]}}})
    stoker.wait_ready(kube, "model")
    for item in kube.items("controllerrevisions"):
        if "stoker.dev/failed" in item["metadata"]["annotations"]:
            kube.kubectl("delete", "controllerrevision", item["metadata"]["name"])


def settled(kube: Kube) -> bool:
    status = kube.get("infsvc", "model")["status"]
    return bool(status["replicas"] == 1 and not status["terminatingReplicas"])


def uids(kube: Kube) -> set[str]:
    return {pod["metadata"]["uid"] for pod in stoker.engine_pods(kube, "model")}
