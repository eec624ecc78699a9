"""An operator that is killed before each of the writes of a rollout: the next one, which knows nothing, finishes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
ROUNDS = 200


class Killed(BaseException):
    """The process is gone: nothing of the operator's catches this."""


class MortalCluster:
    """A connection whose process is killed before its next write once it has made `writes` of them, events apart."""

    def __init__(self, cluster: Cluster, writes: int) -> None:
        self._cluster, self._left = cluster, writes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cluster, name)
        return self._counted(found) if name in ("apply", "delete") else found

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def once(*arguments: Any, **named: Any) -> Any:
            if not self._left:
                raise Killed
            self._left -= 1
            return await write(*arguments, **named)

        return once


@pytest.fixture
def live(cluster: Cluster, namespace: str, node: Node) -> Callable[..., Any]:
    """Live with one operator until the newest generation is ready (True), or until it is killed (False)."""

    async def run(operator: Any, name: str = "demo") -> bool:
        reconciler = Reconciler(operator, PodClient(2.0), Settings())
        for _ in range(ROUNDS):
            try:
                await reconciler.reconcile(namespace, name)
            except Killed:
                return False
            for pod in await node.pods("fetch"):
                if pod["status"]["phase"] == "Pending":
                    await node.fetch_all()
            for pod in await node.pods("engine"):
                if not is_ready(pod):
                    node.run(pod)
            found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
            assert found is not None
            ready = condition(found, "Ready")
            if ready["status"] == "True" and ready["observedGeneration"] == found["metadata"]["generation"]:
                return True
            await asyncio.sleep(0.05)
        raise AssertionError(f"it never became ready: {ready}")

    return run


async def new_process(live: Callable[..., Any], name: str = "demo") -> None:
    """Another operator, with nothing of what the one before knew, takes over and finishes."""
    fresh = await Cluster.connect()
    try:
        assert await live(fresh, name)
    finally:
        await fresh.close()


async def test_a_first_rollout(
    create: Callable[..., Any], live: Callable[..., Any], cluster: Cluster, namespace: str, engine: list[Object]
) -> None:
    for writes in count():
        name = f"demo{writes}"
        await create(name, placement=UNSCHEDULED)
        killed = not await live(MortalCluster(cluster, writes), name)
        if killed:
            await new_process(live, name)
        ours = f"app.kubernetes.io/instance={name}"
        assert len(await cluster.list_all(kinds.JOB, namespace, ours)) == 1, f"{writes} writes: fetched twice"
        assert len(await cluster.list_all(kinds.REPLICA_SET, namespace, ours)) == 1
        assert len(await cluster.list_all(kinds.CONTROLLER_REVISION, namespace, ours)) == 1
        if not killed:
            break
    assert writes > 10, "a whole rollout took fewer writes than it has objects"


async def test_an_update(
    create: Callable[..., Any],
    live: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    engine: list[Object],
) -> None:
    await create("demo", placement=UNSCHEDULED)
    assert await live(cluster)
    for writes in count():
        before = await revision(cluster, namespace)
        change = {"spec": {"runtime": {"args": ["--seed", str(writes + 1)]}}}
        kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(change))
        killed = not await live(MortalCluster(cluster, writes))
        if killed:
            await new_process(live)
        assert await revision(cluster, namespace) == before + 1, f"{writes} writes: another number of rollouts than one"
        assert len(await cluster.list_all(kinds.JOB, namespace)) == 1
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        assert found is not None
        records = await cluster.list_all(kinds.CONTROLLER_REVISION, namespace)
        served = {item["metadata"]["annotations"]["stoker.dev/pod-template-hash"]: item for item in records}
        current = served[found["status"]["revisions"]["current"]]
        assert current["metadata"]["annotations"]["stoker.dev/served"] == "true"
        if not killed:
            break
    assert writes >= 4, "an update is the Deployment, its record twice, and the status"


async def revision(cluster: Cluster, namespace: str) -> int:
    """The Deployment's own count of its rollouts."""
    found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert found is not None
    return int(found["metadata"]["annotations"]["deployment.kubernetes.io/revision"])
