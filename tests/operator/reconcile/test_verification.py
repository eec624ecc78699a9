"""Scheduled verification on a real API server: rot is found and mended while the pods serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
ROT = {"reason": "ChecksumMismatch", "message": "sha256-abab/m.gguf has other bytes than those published."}


@pytest.fixture
def later(reconciler: Reconciler, namespace: str, cluster: Cluster) -> Callable[[float], Any]:
    """Reconcile `demo` so many seconds ahead of the clock; returns the whole object."""

    async def look(seconds: float) -> Object:
        ahead = replace(reconciler, clock=lambda: datetime.now(UTC) + timedelta(seconds=seconds))
        await ahead.reconcile(namespace, "demo")
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        assert found is not None
        return found

    return look


@pytest.fixture
def until(later: Callable[[float], Any], eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Reconcile so far ahead until CacheVerified has a status."""

    async def wait(seconds: float, status: str) -> Object:
        async def there() -> Object | None:
            found: Object = await later(seconds)
            return found if condition(found, "CacheVerified")["status"] == status else None

        return await eventually(there)  # type: ignore[no-any-return]

    return wait


def end(node: Node, pod: Object, report: Object | None) -> None:
    """A verification ends: with a report of what is wrong, or well."""
    ended: Object = {"exitCode": 3 if report else 0, "finishedAt": "2026-01-01T00:00:00Z"}
    ended |= {"message": json.dumps(report)} if report else {}
    status = {"name": "verify", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    phase = "Failed" if report else "Succeeded"
    node.patch(pod, {"phase": phase, "containerStatuses": [status | {"state": {"terminated": ended}}]})


async def test_rot_is_found_and_mended_beside_the_pods_that_serve(
    serve: Callable[..., Any],
    later: Callable[[float], Any],
    until: Callable[..., Any],
    node: Node,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    await serve(cache={"verify": "Scheduled", "verifyEvery": "300s"})
    [serving] = await node.pods("engine")
    assert not await node.pods("verify")
    await later(400)
    [pod] = await eventually(lambda: node.pods("verify"))
    end(node, pod, ROT)
    found = await until(400, "False")
    assert condition(found, "Ready")["status"] == "True"
    assert condition(found, "Degraded")["reason"] == "CacheCorrupt"
    assert condition(found, "ModelCached")["status"] == "False"
    assert "m.gguf has other bytes" in condition(found, "CacheVerified")["message"]
    told = json.loads(kubectl("get", "events", "-o", "json"))["items"]
    assert [event["type"] for event in told if event["reason"] == "CacheCorrupt"] == ["Warning"]

    async def repairs() -> list[Object]:
        return [pod for pod in await node.pods("fetch") if "--repair" in pod["spec"]["containers"][0]["args"]]

    [repair] = await eventually(repairs)
    kubectl(
        "patch", "infsvc", "demo", "--type=merge", "-p", json.dumps({"spec": {"runtime": {"args": ["--seed", "5"]}}})
    )
    waiting = await later(400)
    assert condition(waiting, "Ready")["reason"] == "CacheCorrupt", "nobody new reads rotten bytes"
    [still] = await node.pods("engine")
    assert (still["metadata"]["uid"], still["spec"]) == (serving["metadata"]["uid"], serving["spec"])
    node.end(repair, 0, {"resolvedRevision": "c0ffee0123456789", "digest": "sha256:" + "ab" * 32, "bytes": 98362432,
                         "path": "sha256-abab", "serve": "sha256-abab/m.gguf"})  # fmt: skip
    mended = await until(400, "True")
    assert mended["status"]["cache"]["verifiedTime"]

    async def rolled_out() -> bool:
        for pod in await node.pods("engine"):
            if not is_ready(pod):
                node.run(pod, check=False)
        found = await later(0)
        return condition(found, "Ready")["status"] == "True" and "--seed" in str(await node.pods("engine"))

    assert await eventually(rolled_out)
    assert condition(await later(0), "Degraded")["status"] == "False"


async def test_a_verification_that_found_nothing_writes_once_and_rests(
    serve: Callable[..., Any],
    later: Callable[[float], Any],
    until: Callable[..., Any],
    node: Node,
    cluster: Cluster,
    namespace: str,
    eventually: Callable[..., Any],
) -> None:
    await serve(cache={"verify": "Scheduled", "verifyEvery": "300s"})
    await later(400)
    [pod] = await eventually(lambda: node.pods("verify"))
    end(node, pod, None)
    found = await until(0, "True")
    assert condition(found, "Ready")["status"] == "True"
    await later(0)
    before = await versions(cluster, namespace)
    await later(0)
    assert await versions(cluster, namespace) == before
    await later(800)

    async def another() -> bool:
        return any(item["metadata"]["uid"] != pod["metadata"]["uid"] for item in await node.pods("verify"))

    assert await eventually(another)


async def test_a_restart_by_hand_loads_what_was_mended(
    serve: Callable[..., Any],
    later: Callable[[float], Any],
    node: Node,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    """What the message about rot advises: nobody takes the annotation of `kubectl rollout restart` out again."""
    await serve()
    [before] = await node.pods("engine")
    kubectl("rollout", "restart", "deployment", "demo")

    async def anew() -> bool:
        for pod in await node.pods("engine"):
            if not is_ready(pod):
                node.run(pod, check=False)
        found = await later(0)
        pods = await node.pods("engine")
        there = len(pods) == 1 and pods[0]["metadata"]["uid"] != before["metadata"]["uid"]
        return there and condition(found, "Ready")["status"] == "True"

    assert await eventually(anew)
