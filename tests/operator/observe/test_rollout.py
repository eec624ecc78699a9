"""rollout.py: a rollout is judged by pod template hash, never by counts."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.observe.rollout import Rollout, read


def deployment(generation: int = 2, seen: int = 2, revision: str = "2", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "uid": "d",
            "generation": generation,
            "annotations": {"deployment.kubernetes.io/revision": revision},
        },
        "spec": {"replicas": 2} | spec,
        "status": {"observedGeneration": seen, "readyReplicas": 2, "updatedReplicas": 2, "replicas": 2},
    }


def replica_set(revision: str, template: str, owner: str = "d") -> dict[str, Any]:
    return {
        "metadata": {
            "ownerReferences": [{"uid": owner}],
            "annotations": {"deployment.kubernetes.io/revision": revision},
            "labels": {"pod-template-hash": template},
        }
    }


def pod(template: str, *, ready: bool = True, terminating: bool = False, phase: str = "Running") -> dict[str, Any]:
    meta: dict[str, Any] = {"name": "p", "labels": {"pod-template-hash": template}}
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": meta,
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


SETS = [replica_set("1", "old"), replica_set("2", "new"), replica_set("2", "stranger", owner="other")]
CASES = {
    "no deployment": (None, [pod("old")], (0, 1, 1, 0, 0, "", False)),
    "settled": (deployment(), [pod("new"), pod("new")], (2, 2, 2, 2, 0, "new", True)),
    "old pods make up the count": (deployment(), [pod("new"), pod("old")], (2, 2, 2, 1, 0, "new", False)),
    "one too many": (deployment(), [pod("new"), pod("new"), pod("old")], (2, 3, 3, 2, 0, "new", False)),
    "not ready": (deployment(), [pod("new"), pod("new", ready=False)], (2, 2, 1, 2, 0, "new", False)),
    "controller lags": (deployment(3, 2), [pod("new"), pod("new")], (2, 2, 2, 0, 0, "", False)),
    "no replica set yet": (deployment(revision="3"), [pod("new")], (2, 1, 1, 0, 0, "", False)),
    "terminating pods hold GPUs": (
        deployment(),
        [pod("new"), pod("new"), pod("old", terminating=True)],
        (2, 2, 2, 2, 1, "new", True),
    ),
    "evicted pods do not count": (
        deployment(),
        [pod("new"), pod("new"), pod("new", ready=False, phase="Failed")],
        (2, 2, 2, 2, 0, "new", True),
    ),
    "scaled to zero": (deployment(replicas=0), [], (0, 0, 0, 0, 0, "new", True)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_read(case: tuple[Any, list[Any], tuple[Any, ...]]) -> None:
    there, pods, expected = case
    state = read(there, SETS, pods)
    found = (state.desired, state.total, state.ready, state.updated, state.terminating, state.current, state.settled)
    assert found == expected


def test_a_stuck_rollout_says_so() -> None:
    there = deployment()
    there["status"]["conditions"] = [{"type": "Progressing", "status": "False", "message": "timed out"}]
    assert read(there, SETS, []).failed == "timed out"


def test_a_refused_pod_says_so() -> None:
    there = deployment()
    there["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]
    assert read(there, SETS, []).failed == "exceeded quota"


def test_nothing_is_not_settled() -> None:
    assert not Rollout().settled
