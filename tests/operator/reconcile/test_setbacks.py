"""What befalls pods and caches, on a real API server: what the status says of it, and that it heals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
POD_FAILURES: dict[str, tuple[str, Object]] = {
    "unschedulable": (
        "Unschedulable",
        {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                }
            ]
        },
    ),
    "crash loop": (
        "CrashLoop",
        {
            "containerStatuses": [
                {
                    "name": "engine",
                    "image": "i",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 3,
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {"terminated": {"exitCode": 2, "message": "ConfigError: --dtype is 'bf'"}},
                }
            ]
        },
    ),
    "image": (
        "ImagePullFailed",
        {
            "containerStatuses": [
                {
                    "name": "engine",
                    "image": "stoker/nowhere:1",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                }
            ]
        },
    ),
}


async def test_a_pod_that_does_not_run_says_why_and_recovers(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    await create("demo", placement=UNSCHEDULED)
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    [pod] = await eventually(lambda: node.pods("engine"))
    for reason, status in POD_FAILURES.values():
        node.patch(pod, {"conditions": None, "containerStatuses": None} | status)
        found = await look(reason)
        assert pod["metadata"]["name"] in condition(found, "Ready")["message"]
        if reason == "Unschedulable":
            assert condition(found, "Scheduled")["status"] == "False"
    node.patch(pod, {"conditions": None, "containerStatuses": None})
    node.run(pod)
    await look("Serving")


async def test_a_corrupt_cache_is_fetched_anew(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    eventually: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
) -> None:
    await serve()
    [pod] = await node.pods("engine")
    message = json.dumps({"reason": "ChecksumMismatch", "message": "m.gguf is not what was published"})
    ended = {"exitCode": 3, "message": message, "finishedAt": "2099-01-01T00:00:00Z"}
    verify = {"name": "verify", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    node.patch(pod, {"initContainerStatuses": [verify | {"state": {"terminated": ended}}]})
    found = await look("CacheCorrupt")
    assert "m.gguf is not what was published" in condition(found, "ModelCached")["message"]
    jobs = await cluster.list_all(kinds.JOB, namespace)
    [repair] = [job for job in jobs if job["metadata"]["name"].endswith("-2")]
    assert "--repair" in repair["spec"]["template"]["spec"]["containers"][0]["args"]
    for _ in range(2):
        repairing = await look("CacheCorrupt")
    assert "fetches again what changed in the cache" in condition(repairing, "Ready")["message"]
    assert condition(repairing, "Degraded")["status"] == "True"
    kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")
    await node.fetch_all()
    assert "rolled out" in condition(await look("PodsStarting"), "Ready")["message"]
    await node.run_all(1)
    await look("Serving")
    reasons = json.loads(kubectl("get", "events", "-o", "json"))["items"]
    assert not {"CrashLoop", "PodRestarting"} & {item["reason"] for item in reasons}


def container(**status: Any) -> Object:
    """The engine's entry in a pod's status."""
    empty = {"name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    return {"containerStatuses": [empty | {"state": {"running": {"startedAt": "2026-01-01T12:00:00Z"}}} | status]}


def unready(since: str) -> Object:
    return {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}]}


KILLED = {"exitCode": 1, "message": "EngineDeadError: the engine process was ended by SIGKILL"}
AN_HOUR = {"startedAt": "2026-01-01T10:00:00Z", "finishedAt": "2026-01-01T11:00:00Z"}
SETBACKS: dict[str, tuple[Object, str, str]] = {
    # name: (status of one of two pods of a revision that serves, Ready's reason, what its message says)
    "engine killed": (
        container(state={"terminated": KILLED | AN_HOUR}) | unready("2026-01-01T11:00:00Z"),
        "PodRestarting",
        "ended with exit code 1: EngineDeadError: the engine process was ended by SIGKILL. The container starts again",
    ),
    "loads again": (
        container(restartCount=1, lastState={"terminated": KILLED | AN_HOUR}) | unready("2026-01-01T11:00:00Z"),
        "PodRestarting",
        "The container starts again by itself.",
    ),
    "hangs": (container() | unready("2026-01-01T13:00:00Z"), "PodNotReady", "was ready and is not any more"),
    "gone": ({}, "PodsStarting", "1 of 2 pods of revision"),
}


async def test_what_befalls_a_pod_that_served_is_no_rollout(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    await serve(replicas=2)
    for status, reason, says in SETBACKS.values():
        pod = (await node.pods("engine"))[0]
        if status:
            node.patch(pod, status)
        else:
            kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")
        found = await look(reason)
        assert says in condition(found, "Ready")["message"]
        assert (condition(found, "Servable")["status"], found["status"]["readyReplicas"]) == ("True", 1)
        assert condition(found, "Degraded")["status"] == str(bool(status))
        for again in await node.pods("engine"):
            node.patch(again, {"conditions": None, "containerStatuses": None})
        await node.run_all(2)
        await look("Serving")
    assert len(engine) == 1, "a revision that answered was asked again"
    events = json.loads(kubectl("get", "events", "-o", "json"))["items"]
    told = [item["reason"] for item in events if item["involvedObject"]["kind"] == "InferenceService"]
    assert told.count("RollingOut") == 1
    kinds_told = {item["reason"]: item["type"] for item in events}
    assert [kinds_told[name] for name in ("PodRestarting", "PodNotReady", "PodsStarting")] == [
        *("Warning", "Warning"), "Normal",
    ]  # fmt: skip
