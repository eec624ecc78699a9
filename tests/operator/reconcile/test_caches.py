"""Volumes and prefetches on a real API server: what hangs is replaced, what is deleted goes, what is left is ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import ApplyFailed, Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


@pytest.fixture
def change(kubectl: Callable[..., str]) -> Callable[..., None]:
    def patch(name: str = "demo", /, **spec: Any) -> None:
        kubectl("patch", "infsvc", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    return patch


@pytest.mark.parametrize(
    ("wrong", "right", "field"),
    [
        ({"runtime": {"image": "nowhere/none:1"}}, {"runtime": {"image": "stoker/runtime:7"}}, "image"),
        (
            {"placement": UNSCHEDULED | {"nodeSelector": {"no": "node"}}},
            {"placement": UNSCHEDULED | {"nodeSelector": None}},
            "pod",
        ),
        (
            {"model": {"uri": "hf://a/b", "secretRef": {"name": "typo"}}},
            {"model": {"uri": "hf://a/b", "secretRef": {"name": "token"}}},
            "env[name=HF_TOKEN]",
        ),
    ],
    ids=["image", "nodeSelector", "secret"],
)
async def test_a_corrected_spec_does_not_wait_for_a_prefetch_that_hangs(
    create: Callable[..., Any],
    look: Callable[..., Any],
    change: Callable[..., None],
    node: Node,
    cluster: Cluster,
    namespace: str,
    eventually: Callable[..., Any],
    engine: list[Object],
    wrong: Object,
    right: Object,
    field: str,
) -> None:
    await create("demo", **({"placement": UNSCHEDULED} | wrong))
    await look("Fetching")
    [stuck] = await eventually(lambda: node.pods("fetch"))
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    status = {"name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    node.patch(stuck, {"containerStatuses": [status | {"state": {"waiting": waiting}}]})
    await look("ImagePullFailed")
    change(**right)
    found = await look("Fetching")
    assert field in condition(found, "Ready")["message"]

    async def replaced() -> bool:
        names = {pod["metadata"]["name"] for pod in await node.pods("fetch")}
        return bool(names) and stuck["metadata"]["name"] not in names

    assert await eventually(replaced)
    assert [job["metadata"]["name"][-2:] for job in await cluster.list_all(kinds.JOB, namespace)] == ["-2"]
    await node.fetch_all()
    await look("RollingOut")


async def test_a_deleted_volume_goes_while_finished_fetch_pods_name_it(
    create: Callable[..., Any],
    look: Callable[..., Any],
    change: Callable[..., None],
    node: Node,
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    await create("demo", placement=UNSCHEDULED)
    await look("Fetching")
    [pod] = await eventually(lambda: node.pods("fetch"))
    node.bind(pod, "n1")
    node.end(pod, 3, {"reason": "VolumeFull", "message": "no space"})
    full = await look("VolumeFull")
    claim = full["status"]["cache"]["claim"]
    assert f"kubectl delete pvc {claim}" in condition(full, "Ready")["message"]
    change(cache={"pvc": {"size": "77Gi"}})
    with pytest.raises(ApplyFailed, match=f"kubectl delete pvc {claim}"):  # no storage class here can grow volumes
        await reconciler.reconcile(namespace, "demo")
    kubectl("delete", "pvc", claim, "--wait=false")

    async def anew() -> bool:
        await reconciler.reconcile(namespace, "demo")
        found = await cluster.get(kinds.CLAIM, namespace, claim)
        return bool(found and found["spec"]["resources"]["requests"]["storage"] == "77Gi")

    assert await eventually(anew)


async def test_two_services_that_move_on_one_after_the_other_leave_no_volume(
    create: Callable[..., Any],
    look: Callable[..., Any],
    change: Callable[..., None],
    node: Node,
    cluster: Cluster,
    namespace: str,
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    for name in ("one", "two"):
        await create(name, placement=UNSCHEDULED)
        await look("Fetching", name)
    await eventually(lambda: node.pods("fetch"))
    await node.fetch_all()
    for name in ("one", "two"):
        await look("RollingOut", name)
    await node.run_all(2)
    for name in ("one", "two"):
        await look("Serving", name)
    [old] = await cluster.list_all(kinds.CLAIM, namespace)
    for name in ("one", "two"):
        change(name, model={"uri": "hf://org/newer"})
        await look("Fetching", name)
        await node.fetch_all()
        await look("RollingOut", name)
        moved = await move(look, node, name)
        assert condition(moved, "Ready")["status"] == "True"

    async def left() -> list[str]:
        return [item["metadata"]["name"] for item in await cluster.list_all(kinds.CLAIM, namespace)]

    async def only_the_new_one() -> bool:
        return old["metadata"]["name"] not in await left()

    assert await eventually(only_the_new_one)
    assert len(await left()) == 1


async def move(look: Callable[..., Any], node: Node, name: str) -> Object:
    """Let new pods run as they come, and old ones go, until the service serves."""
    for _ in range(10):
        for pod in await node.pods("engine"):
            if not is_ready(pod):
                node.run(pod, check=False)
        try:
            return await look("Serving", name, seconds=2)  # type: ignore[no-any-return]
        except AssertionError:
            continue
    raise AssertionError(f"{name} does not serve")
