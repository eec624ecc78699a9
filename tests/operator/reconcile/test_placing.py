"""Changes on a real API server with nodes that are full: who serves goes only for who can take the place."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


@pytest.fixture
def full_node(bare_node: str, kubectl: Callable[..., str]) -> str:
    """A node with one GPU."""
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", "nvidia.com/gpu": "1"}
    status = {"allocatable": amounts, "capacity": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
    kubectl("patch", "node", bare_node, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    kubectl("taint", "node", bare_node, "node.kubernetes.io/not-ready:NoSchedule-", check=False)
    return bare_node


@pytest.fixture
def serving_pod(
    create: Callable[..., Any], look: Callable[..., Any], node: Node, full_node: str, eventually: Callable[..., Any]
) -> Callable[[Object], Awaitable[Object]]:
    """Make the service "demo" with such resources; its one pod serves on the node."""

    async def serve(resources: Object) -> Object:
        await create("demo", placement=UNSCHEDULED, resources=resources)
        await look("Fetching")
        await node.fetch_all()
        await look("RollingOut")
        [pod] = await eventually(lambda: node.pods("engine"))
        node.bind(pod, full_node)
        node.run(pod)
        await look("Serving")
        return pod  # type: ignore[no-any-return]

    return serve


@pytest.fixture
def deployed(cluster: Cluster, namespace: str) -> Callable[[], Awaitable[Object]]:
    """The spec of its Deployment."""

    async def spec() -> Object:
        found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert found is not None
        return dict(found["spec"])

    return spec


async def test_a_serving_pod_gives_way_only_to_one_that_can_take_its_place(
    look: Callable[..., Any],
    node: Node,
    serving_pod: Callable[[Object], Awaitable[Object]],
    deployed: Callable[[], Awaitable[Object]],
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    gpu = {"gpus": 1, "memory": "4Gi"}
    old = await serving_pod(gpu)

    def change(spec: Object) -> None:
        kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps({"spec": spec}))

    known = {old["metadata"]["name"]}

    async def waits(said: str) -> Object:
        """Plays the scheduler's part: the pod of the latest change finds no node."""

        async def new() -> Object | None:
            # Its predecessor, which found none either, may still be going.
            return next((pod for pod in await node.pods("engine") if pod["metadata"]["name"] not in known), None)

        pod = await eventually(new)
        known.add(pod["metadata"]["name"])
        message = f"0/1 nodes are available: {said}."
        node.patch(pod, {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]})
        return await look("Unschedulable")  # type: ignore[no-any-return]

    for spec, said in (
        ({"placement": UNSCHEDULED | {"nodeSelector": {"no": "node"}}}, "1 node(s) didn't match Pod's node selector"),
        ({"placement": UNSCHEDULED | {"nodeSelector": None}, "resources": gpu | {"memory": "900Gi"}},
         "1 Insufficient memory"),
    ):  # fmt: skip
        change(spec)
        await look("RollingOut")
        found = await waits(said)
        assert condition(found, "Servable")["status"] == "True"
        assert (await deployed())["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert old["metadata"]["name"] in {pod["metadata"]["name"] for pod in await node.pods("engine")}
    change({"resources": gpu | {"memory": "5Gi"}})
    await look("RollingOut")
    # Its GPU is what the new one lacks.
    assert (await deployed())["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}

    async def gone() -> bool:
        return old["metadata"]["name"] not in {pod["metadata"]["name"] for pod in await node.pods("engine")}

    assert await eventually(gone)


async def test_a_surge_leaves_a_gpu_to_a_pod_that_waits_for_it(
    look: Callable[..., Any],
    full_node: str,
    serving_pod: Callable[[Object], Awaitable[Object]],
    deployed: Callable[[], Awaitable[Object]],
    kubectl: Callable[..., str],
    engine: list[Object],
) -> None:
    """Whoever waits has the scheduler's next look; a surge made meanwhile would be quicker."""
    two = json.dumps({"status": {"allocatable": {"nvidia.com/gpu": "2"}, "capacity": {"nvidia.com/gpu": "2"}}})
    kubectl("patch", "node", full_node, "--subresource=status", "--type=merge", "-p", two)
    await serving_pod({"gpus": 1, "memory": "4Gi"})
    container = {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "another"}}
    kubectl("create", "-f", "-", stdin=head | {"spec": {"schedulerName": "nobody", "containers": [container]}})

    async def changed(seed: str) -> Object:
        patch = {"spec": {"runtime": {"args": ["--seed", seed]}}}
        kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(patch))
        await look("RollingOut")
        found = await deployed()
        assert seed in found["template"]["spec"]["containers"][0]["args"]
        return dict(found["strategy"]["rollingUpdate"])

    assert await changed("11") == {"maxSurge": 0, "maxUnavailable": 1}
