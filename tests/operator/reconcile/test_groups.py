"""Replicas that span nodes, on a real API server: real StatefulSets under a stand-in for the groups' controller, and
under that controller itself where it is built.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.operator import stand_in
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import LEADER_WORKER_SET, SECRET
from stoker_operator.manifests.revision import TEMPLATE_KEY
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
SET = "demo-nodes"
SPEC: Object = {"resources": {"gpus": 0, "nodes": 2}, "parallelism": {"pipeline": 2}, "placement": UNSCHEDULED}


@pytest.fixture(params=["stand-in", "publisher's"])
async def grouped(request: pytest.FixtureRequest, cluster: Cluster, namespace: str) -> AsyncIterator[asyncio.Lock]:
    """A controller of groups at work in the test's namespace; the stand-in rests while the lock is held."""
    lock = asyncio.Lock()
    if request.param != "stand-in":
        request.getfixturevalue("published")
        yield lock
        return
    request.getfixturevalue("groups_defined")
    task = asyncio.create_task(stand_in.follow(cluster, namespace, lock))
    yield lock
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def run_groups(node: Node, eventually: Callable[..., Any]) -> Callable[..., Awaitable[list[Object]]]:
    """Have all pods of so many groups of two run; returns them, leaders first."""

    async def run(count: int) -> list[Object]:
        async def there() -> list[Object]:
            found = [*await node.pods("engine"), *await node.pods("worker")]
            return found if len(found) == 2 * count else []

        pods = await eventually(there)
        for pod in pods:
            if not is_ready(pod):
                node.run(pod)
        return pods  # type: ignore[no-any-return]

    return run


async def test_a_group_is_made_serves_is_made_anew_and_goes(
    grouped: asyncio.Lock,
    create: Any,
    look: Any,
    node: Node,
    run_groups: Any,
    engine: list[Object],
    cluster: Cluster,
    namespace: str,
    eventually: Any,
) -> None:
    await create("demo", **SPEC)
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    leader, worker = await run_groups(1)
    ready = await look("Serving")
    assert "1 of 1 groups" in condition(ready, "Ready")["message"]
    assert (ready["status"]["replicas"], ready["status"]["gpus"]) == (1, 0)
    assert len(engine) == 1, "one leader was asked, and no worker"
    assert await cluster.get(kinds.DEPLOYMENT, namespace, "demo") is None

    secret = await cluster.get(SECRET, namespace, SET)
    assert secret is not None
    value = base64.b64decode(secret["data"]["secret"]).decode()
    assert len(value) >= 32
    assert [owner["kind"] for owner in secret["metadata"]["ownerReferences"]] == ["LeaderWorkerSet"]
    told = {item["name"]: item for item in worker["spec"]["containers"][0]["env"]}
    assert told["LWS_LEADER_ADDRESS"]["value"] == f"{SET}-0.{SET}.{namespace}"
    events = await cluster.list_all(kinds.EVENT, namespace)
    assert any("Secret" in event["message"] for event in events)
    assert value not in str(events) + str(ready) + str(leader) + str(worker)

    # The worker's container ends: its whole group is another one then.
    ended = {"exitCode": 139, "finishedAt": "2026-01-01T00:00:00Z"}
    container = {"name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 1}
    crashed = container | {"state": {"waiting": {"reason": "Starting"}}, "lastState": {"terminated": ended}}
    async with grouped:
        # The publisher's controller deletes it at once; a kubelet would have it end first.
        node.hold(worker)
        node.patch(worker, {"containerStatuses": [crashed], "conditions": [{"type": "Ready", "status": "False"}]})
        again = await look("GroupRestarting")
    assert f"pod {SET}-0-1, container engine, ended with exit code 139" in condition(again, "Ready")["message"]
    node.release(worker)

    async def anew() -> bool:
        uids = {pod["metadata"]["uid"] for pod in [*await node.pods("engine"), *await node.pods("worker")]}
        return len(uids) == 2 and not uids & {leader["metadata"]["uid"], worker["metadata"]["uid"]}

    await eventually(anew)
    await run_groups(1)
    healed = await look("Serving")
    [group] = healed["status"]["groups"]
    assert (group["index"], group["restarts"]) == (0, 1)

    await cluster.delete(kinds.INFERENCE_SERVICE, namespace, "demo", healed["metadata"]["uid"])

    async def nothing() -> bool:
        left = [await cluster.list_all(kind, namespace) for kind in (LEADER_WORKER_SET, stand_in.STATEFUL_SET, SECRET)]
        left += [[pod for pod in await cluster.list_all(kinds.POD, namespace) if "worker" in str(pod)]]
        return not any(left)

    await eventually(nothing)


async def test_from_a_pod_to_groups_and_back_nothing_is_left(
    grouped: asyncio.Lock,
    serve: Any,
    look: Any,
    node: Node,
    run_groups: Any,
    cluster: Cluster,
    namespace: str,
    reconciler: Reconciler,
    eventually: Any,
) -> None:
    await serve()
    single = (await node.pods("engine"))[0]
    patch = {"spec": {"resources": SPEC["resources"], "parallelism": SPEC["parallelism"]}}
    await cluster.merge(kinds.INFERENCE_SERVICE, namespace, "demo", patch)
    await look("RollingOut")
    assert await cluster.get(kinds.DEPLOYMENT, namespace, "demo"), "it serves until the group does"

    async def grouped_pods() -> list[Object]:
        found = [*await node.pods("engine"), *await node.pods("worker")]
        return [pod for pod in found if pod["metadata"]["name"].startswith(SET)] if len(found) == 3 else []

    for pod in await eventually(grouped_pods):
        node.run(pod)
    await look("Serving")
    names = {pod["metadata"]["name"] for pod in await node.pods("engine")}
    assert names == {f"{SET}-0"}
    assert single["metadata"]["name"] not in names

    async def replaced() -> bool:
        return await cluster.get(kinds.DEPLOYMENT, namespace, "demo") is None

    await eventually(replaced)
    patch = {"spec": {"resources": {"nodes": 1}, "parallelism": {"pipeline": 1}}}
    await cluster.merge(kinds.INFERENCE_SERVICE, namespace, "demo", patch)
    await look("RollingOut")
    await eventually(_another(node))
    for pod in await node.pods("engine"):
        if not is_ready(pod):
            node.run(pod)
    await look("Serving")

    async def gone() -> bool:
        await reconciler.reconcile(namespace, "demo")
        left = [await cluster.list_all(kind, namespace) for kind in (LEADER_WORKER_SET, stand_in.STATEFUL_SET, SECRET)]
        return not any(left) and await cluster.get(kinds.SERVICE, namespace, SET) is None

    await eventually(gone)
    assert len(await node.pods("engine")) == 1


def _another(node: Node) -> Callable[[], Awaitable[bool]]:
    """Whether there is a pod of a Deployment beside the group's."""

    async def there() -> bool:
        return any(not pod["metadata"]["name"].startswith(SET) for pod in await node.pods("engine"))

    return there


async def test_a_settled_group_is_written_nothing(
    grouped: asyncio.Lock, create: Any, look: Any, node: Node, run_groups: Any, engine: list[Object], cluster: Cluster,
    namespace: str, reconciler: Reconciler,
) -> None:  # fmt: skip
    """Twice the same look: the second one finds every field as it was applied, and takes out what others put in."""
    await create("demo", replicas=2, **SPEC)
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    await run_groups(2)
    await look("Serving")
    before = await cluster.get(LEADER_WORKER_SET, namespace, SET)
    assert before is not None
    await reconciler.reconcile(namespace, "demo")
    after = await cluster.get(LEADER_WORKER_SET, namespace, SET)
    assert after is not None
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    spec = before["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    spec["containers"][0]["env"].append({"name": "STOKER_SEED", "value": "3"})
    patch = {"spec": {"leaderWorkerTemplate": {"workerTemplate": {"spec": spec}}}}
    await cluster.merge(LEADER_WORKER_SET, namespace, SET, patch)
    async with asyncio.timeout(20):  # until it has heard of it
        mended = None
        while mended is None or mended["spec"] != after["spec"]:
            await reconciler.reconcile(namespace, "demo")
            mended = await cluster.get(LEADER_WORKER_SET, namespace, SET)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_change_goes_by_whole_groups(
    replicas: int, create: Any, look: Any, node: Node, run_groups: Any, engine: list[Object], cluster: Cluster,
    namespace: str, kubectl: Callable[..., str], reconciler: Reconciler, eventually: Any,
) -> None:  # fmt: skip
    """No group of before goes until one of the new revision has all of its pods, and the status counts whole ones."""
    await create("demo", replicas=replicas, **SPEC)
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    await run_groups(replicas)
    await look("Serving")
    before = {pod["metadata"]["uid"] for pod in await pods_of_groups(node)}
    patch = {"spec": {"runtime": {"contextLength": 768}}}
    await cluster.merge(kinds.INFERENCE_SERVICE, namespace, "demo", patch)
    rolling = await look("RollingOut")
    assert condition(rolling, "Servable")["status"] == "True"

    async def beside() -> list[Object]:
        await reconciler.reconcile(namespace, "demo")
        return [pod for pod in await pods_of_groups(node) if pod["metadata"]["uid"] not in before]

    async def pair() -> list[Object]:
        found = await beside()
        return found if len(found) == 2 else []

    leader, worker = await eventually(pair)
    assert [pod["metadata"]["name"] for pod in (leader, worker)] == [f"{SET}-{replicas}", f"{SET}-{replicas}-1"]
    assert leader["metadata"]["labels"][TEMPLATE_KEY] == worker["metadata"]["labels"][TEMPLATE_KEY]
    node.run(leader)
    told = await look("RollingOut")
    for _ in range(10):  # the groups' controller has had its turns
        await asyncio.sleep(0.3)
        told = await look("RollingOut")
        assert before < {pod["metadata"]["uid"] for pod in await pods_of_groups(node)}, "half a group took a place"
    assert f"waiting for {SET}-{replicas}-1 to join" in condition(told, "Ready")["message"]
    counted = [told["status"][key] for key in ("replicas", "updatedReplicas", "readyReplicas")]
    assert counted == [replicas + 1, 1, replicas], "half a group counted"

    node.run(worker)
    least = replicas

    async def rolled_out() -> bool:
        nonlocal least
        await reconciler.reconcile(namespace, "demo")
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        there = await pods_of_groups(node)
        least = min(least, whole(there))
        for pod in there:
            if not is_ready(pod):
                node.run(pod, check=False)
        old = before & {pod["metadata"]["uid"] for pod in there}
        ready = found is not None and condition(found, "Ready")["status"] == "True"
        assert not (ready and old), "Ready with a group of before"
        return ready

    await eventually(rolled_out)
    assert least >= replicas - 1 + (replicas == 1), "more groups were gone at a time than one"
    there = await pods_of_groups(node)
    assert {pod["metadata"]["labels"][TEMPLATE_KEY] for pod in there} == {leader["metadata"]["labels"][TEMPLATE_KEY]}
    assert len(there) == 2 * replicas, "Ready while a group stands in for another"
    scale = json.loads(kubectl("get", "infsvc", "demo", "--subresource=scale", "-o", "json"))
    assert scale["status"]["replicas"] == replicas


@pytest.mark.usefixtures("published")
async def test_who_scales_counts_groups_and_so_does_the_status(
    create: Any, look: Any, node: Node, run_groups: Any, engine: list[Object], cluster: Cluster, namespace: str,
    kubectl: Callable[..., str], reconciler: Reconciler, eventually: Any,
) -> None:  # fmt: skip
    """An autoscaler writes the scale of the LeaderWorkerSet, and asks by its selector for the pods it is to measure."""
    await create("demo", autoscaling={"engine": "HPA", "min": 1, "max": 4}, **SPEC)
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    await run_groups(1)
    await look("Serving")
    scaler = await cluster.get(kinds.BY_NAME["HorizontalPodAutoscaler"], namespace, "demo")
    assert scaler is not None
    assert scaler["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    kubectl("scale", f"leaderworkerset/{SET}", "--replicas=3")
    await run_groups(3)

    async def settled() -> Object | None:
        await reconciler.reconcile(namespace, "demo")
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        assert found is not None
        return found if found["status"].get("readyReplicas") == 3 else None

    status = (await eventually(settled))["status"]
    assert (status["replicas"], status["updatedReplicas"], len(await pods_of_groups(node))) == (3, 3, 6)
    assert [group["index"] for group in status["groups"]] == [0, 1, 2]
    path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/{SET}/scale"

    async def scale() -> Object | None:
        found: Object = json.loads(kubectl("get", "--raw", path))
        return found if found["status"]["replicas"] == 3 else None

    told = await eventually(scale)
    chosen = await cluster.list_all(kinds.POD, namespace, told["status"]["selector"])
    assert {pod["metadata"]["name"] for pod in chosen} == {f"{SET}-{index}" for index in range(3)}
    live = await cluster.get(LEADER_WORKER_SET, namespace, SET)
    assert live is not None
    assert live["spec"]["replicas"] == 3, "the operator took back what the autoscaler wrote"


async def pods_of_groups(node: Node) -> list[Object]:
    """Leaders first."""
    return [*await node.pods("engine"), *await node.pods("worker")]


def whole(pods: list[Object]) -> int:
    """How many groups of two have both of their pods ready, of one revision."""
    ready = {(pod["metadata"]["name"], pod["metadata"]["labels"][TEMPLATE_KEY]) for pod in pods if is_ready(pod)}
    return sum((f"{name}-1", revision) in ready for name, revision in ready)


async def test_without_the_kind_the_status_says_what_to_install(create: Any, look: Any, node: Node) -> None:
    await create("demo", **SPEC)
    await look("Fetching")
    await node.fetch_all()
    found = await look("LeaderWorkerSetMissing")
    assert condition(found, "Stalled")["status"] == "True"
