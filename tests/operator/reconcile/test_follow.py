"""A followed revision on a real API server: a new commit becomes a rollout, and one that fails is not tried again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import REPORT, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
FOLLOW = {"uri": "hf://org/model", "updatePolicy": "Follow"}


class Hub:
    """What look-ups and prefetches find, on a clock that a test moves."""

    def __init__(self, reconciler: Reconciler, node: Node, namespace: str) -> None:
        self.reconciler, self.node, self.namespace = reconciler, node, namespace
        self.ahead = timedelta()
        self.commit = str(REPORT["resolvedRevision"])
        self.runs = True

    async def step(self) -> Object:
        """One reconcile, after the kubelet did what there is to do."""
        for pod in await self.node.pods("lookup"):
            if pod["status"]["phase"] == "Pending":
                self.end(
                    pod, "lookup", {"resolvedRevision": self.commit, "digest": "", "bytes": 1, "path": "", "serve": ""}
                )
        for pod in await self.node.pods("fetch"):
            arguments = pod["spec"]["containers"][0]["args"]
            if pod["status"]["phase"] == "Pending":
                asked = arguments[arguments.index("--revision") + 1]
                self.end(pod, "fetch", REPORT | {"resolvedRevision": asked, "path": f"sha256-{asked[:9]}"})
        for pod in await self.node.pods("engine"):
            if not is_ready(pod) and self.runs:
                self.node.run(pod, check=False)
        clock = lambda: datetime.now(UTC) + self.ahead  # noqa: E731
        await replace(self.reconciler, clock=clock).reconcile(self.namespace, "demo")
        found = await self.reconciler.cluster.get(kinds.INFERENCE_SERVICE, self.namespace, "demo")
        assert found is not None
        return found

    def end(self, pod: Object, name: str, report: Object) -> None:
        ended = {"exitCode": 0, "message": json.dumps(report), "finishedAt": "2026-01-01T00:00:00Z"}
        status = {"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        containers = [status | {"state": {"terminated": ended}}]
        self.node.patch(pod, {"phase": "Succeeded", "containerStatuses": containers}, check=False)

    def moves(self, commit: str) -> None:
        """The branch moves, and the interval is over."""
        self.commit = commit
        self.ahead += timedelta(seconds=700)


@pytest.fixture
def hub(reconciler: Reconciler, node: Node, namespace: str) -> Hub:
    return Hub(reconciler, node, namespace)


@pytest.fixture
def until(hub: Hub, eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Steps until `check` says so of the service; returns it."""

    async def wait(check: Callable[[Object], bool]) -> Object:
        async def there() -> Object | None:
            found = await hub.step()
            return found if check(found) else None

        found: Object = await eventually(there)
        return found

    return wait


def serves(commit: str) -> Callable[[Object], bool]:
    def check(found: Object) -> bool:
        model = found["status"].get("model") or {}
        return condition(found, "Ready")["status"] == "True" and model.get("resolvedRevision") == commit

    return check


def mounted(pods: list[Object]) -> list[str]:
    found = [volume for pod in pods for volume in pod["spec"]["volumes"] if volume["name"] == "models"]
    return [str(volume["persistentVolumeClaim"]["claimName"]) for volume in found]


async def test_a_new_commit_is_a_rollout_and_one_that_fails_is_taken_back(
    serve: Callable[..., Any],
    hub: Hub,
    until: Callable[..., Any],
    node: Node,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    await serve(model=FOLLOW, rollout={"progressDeadline": "600s"})
    [first] = mounted(await node.pods("engine"))
    good, bad, better = (token_hex(20) for _ in range(3))

    hub.moves(good)
    found = await until(serves(good))
    assert condition(found, "Following")["reason"] == "UpToDate"
    assert (found["status"]["follow"]["commit"], found["metadata"]["generation"]) == (good, 1)
    [second] = mounted(await node.pods("engine"))
    assert second != first

    async def released() -> bool:
        await hub.step()
        return first not in [claim["metadata"]["name"] for claim in await cluster.list_all(kinds.CLAIM, namespace)]

    assert await eventually(released), "the volume of the commit before goes once the new one serves"
    told = json.loads(kubectl("get", "events", "-o", "json"))["items"]
    assert [event["type"] for event in told if event["reason"] == "NewCommit"] == ["Normal"]
    ours = [event["message"] for event in told if event["involvedObject"]["kind"] == "InferenceService"]
    assert not [text for text in ours if "lookup" in text], "what comes again and again makes no event"

    def patience(seconds: int) -> None:
        spec = {"rollout": {"progressDeadline": f"{seconds}s"}}
        kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps({"spec": spec}))

    patience(3)
    hub.runs = False
    hub.moves(bad)
    await until(lambda found: found["status"].get("follow", {}).get("commit") == bad)

    async def crashes() -> bool:
        waiting = {"reason": "CreateContainerConfigError", "message": "secret not found"}
        status = {"name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        for pod in await node.pods("engine"):
            if not is_ready(pod):
                node.patch(pod, {"containerStatuses": [status | {"state": {"waiting": waiting}}]}, check=False)
        found = await hub.step()
        return bool(condition(found, "Ready")["reason"] == "RolledBack")

    assert await eventually(crashes, 90.0)
    [serving] = [pod for pod in await node.pods("engine") if is_ready(pod)]
    assert mounted([serving]) == [second], "what served never went"
    hub.ahead += timedelta(seconds=2000)
    found = await until(lambda found: condition(found, "Following")["reason"] == "GivenUp")
    assert bad in condition(found, "Following")["message"]

    patience(600)
    hub.runs = True
    hub.moves(better)
    await until(serves(better))
    await until(lambda found: condition(found, "Following")["reason"] == "UpToDate")
    before = await versions(cluster, namespace)
    await hub.step()
    assert await versions(cluster, namespace) == before, "nothing is left to do"
