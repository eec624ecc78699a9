"""Reconciles against a real kube-apiserver with the real Deployment, ReplicaSet, Job and garbage controllers.

There is no node: the `node` fixture writes the pod statuses that a kubelet would write. Engine and prefetch answer
from a real HTTP server on loopback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import REPORT, UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


async def test_from_apply_to_serving(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    await create("demo", replicas=2, placement=UNSCHEDULED)
    await look("Fetching")
    [fetcher] = await eventually(lambda: node.pods("fetch"))
    node.run(fetcher)

    async def progressed() -> Object | None:
        found = await look("Fetching")
        return found if found["status"]["cache"]["progress"] == "25%" else None

    fetching = await eventually(progressed)
    assert "25.0 MB of 100.0 MB, about 9 s to go" in condition(fetching, "ModelCached")["message"]
    assert "False" in kubectl("get", "infsvc", "demo")
    assert " 25% " in kubectl("get", "infsvc", "demo")

    node.end(fetcher, 0, REPORT)
    rolling = await look("RollingOut")
    assert condition(rolling, "ModelCached")["status"] == "True"
    assert rolling["status"]["model"]["resolvedRevision"] == REPORT["resolvedRevision"]
    await node.run_all(2)
    ready = await look("Serving")

    assert [request["model"] for request in engine] == ["demo"]
    status = ready["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["observedGeneration"] == ready["metadata"]["generation"]
    assert condition(ready, "Servable")["status"] == "True"
    assert condition(ready, "Stalled")["status"] == "False"
    kubectl("wait", "--for=condition=Ready", "infsvc/demo", "--timeout=5s")
    heading, row = kubectl("get", "infsvc", "demo").splitlines()
    columns = ["NAME", "READY", "SERVABLE", "REASON", "REPLICAS", "UPDATED", "MODEL", "REV", "GPUS", "CACHE", "AGE"]
    assert heading.split() == columns
    assert row.split()[:10] == ["demo", "True", "True", "Serving", "2", "2", "hf://org/model", "c0ffee0", "0", "100%"]
    assert f"http://demo.{ready['metadata']['namespace']}.svc:" in kubectl("get", "infsvc", "-o", "wide")
    events = kubectl("events", "--for", "inferenceservice/demo")
    for text in (
        "Created Deployment demo: revision c0ffee",
        "hf://org/model at main is not on the volume yet",
        "Serving",
    ):
        assert text in events


IMAGE = {"model": {"uri": "oci://r.example/team/m:v1"}, "cache": {"mode": "Image", "image": {"path": "deep/m"}}}


@pytest.mark.parametrize("spec", [{}, IMAGE], ids=["volume", "image"])
async def test_a_second_reconcile_writes_nothing(
    serve: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    engine: list[Object],
    spec: Object,
) -> None:
    await serve(**spec)
    before = await versions(cluster, namespace)
    for _ in range(3):
        assert await reconciler.reconcile(namespace, "demo") is None
    assert await versions(cluster, namespace) == before
    assert len(engine) == 1


async def test_a_new_revision_is_not_ready_until_it_is_rolled_out_and_answers(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    first = await serve()
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"runtime": {"args": ["--seed", "7"]}}}')
    rolling = await look("RollingOut")
    assert rolling["status"]["observedGeneration"] == 2
    assert condition(rolling, "Servable")["status"] == "True"
    await node.run_all(2)  # the old pod, still there, and the new one
    second = await look("Serving")
    assert second["status"]["revisions"]["answered"] != first["status"]["revisions"]["answered"]
    assert len(engine) == 2


FETCH_FAILURES = [
    ("TokenRejected", "hub.local refused the token", "spec.model.secretRef"),
    ("RevisionNotFound", "there is no revision v9", "spec.model.revision"),
    ("VolumeFull", "needs 15.2 GB, 1.0 GB are free", "spec.cache.pvc.size"),
]


@pytest.mark.parametrize(("reason", "message", "advice"), FETCH_FAILURES)
async def test_a_prefetch_that_cannot_succeed_says_what_to_change(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    reason: str,
    message: str,
    advice: str,
) -> None:
    await create("demo", placement=UNSCHEDULED)
    await look("Fetching")
    [pod] = await eventually(lambda: node.pods("fetch"))
    node.end(pod, 3, {"reason": reason, "message": message})
    found = await look(reason)
    ready = condition(found, "Ready")
    assert message in ready["message"]
    assert advice in ready["message"]
    assert condition(found, "Stalled")["status"] == "True"
    assert f"Warning   {reason}" in kubectl("events", "--for", "inferenceservice/demo")
    job = found["status"]["cache"]
    assert job["attempt"] == 1
    # The person who repaired it need not wait.
    kubectl("delete", "jobs", "--all", "--cascade=background")
    again = await look("Fetching")
    assert again["status"]["cache"]["attempt"] == 2


@pytest.mark.parametrize("cascade", ["background", "foreground"])
async def test_deletion_leaves_nothing(
    serve: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    cascade: str,
) -> None:
    await serve()
    kubectl("delete", "infsvc", "demo", f"--cascade={cascade}", "--wait=false")

    async def gone() -> bool:
        await reconciler.reconcile(namespace, "demo")  # an operator that is awake must not make anything anew
        # No kubelet ends pods here; a grace of 0 is what it would come to.
        kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--ignore-not-found", check=False)
        left = await versions(cluster, namespace)
        return not {key for key in left if key[0] != "Event"}

    assert await eventually(gone, 60)


async def test_a_shared_cache_outlives_one_of_its_services(
    create: Callable[..., Any],
    look: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    for name in ("one", "two"):
        await create(name, placement=UNSCHEDULED)
        await look("Fetching", name)
    [claim] = await cluster.list_all(kinds.CLAIM, namespace)
    assert [owner["name"] for owner in claim["metadata"]["ownerReferences"]].count("one") == 1
    assert len(claim["metadata"]["ownerReferences"]) == 2
    assert len(await cluster.list_all(kinds.JOB, namespace)) == 2
    kubectl("delete", "infsvc", "one")

    async def only_twos_job() -> bool:
        jobs = await cluster.list_all(kinds.JOB, namespace)
        return [job["metadata"]["name"][:3] for job in jobs] == ["two"]

    assert await eventually(only_twos_job, 60)
    assert len(await cluster.list_all(kinds.CLAIM, namespace)) == 1


async def test_scale_and_suspend(
    serve: Callable[..., Any], look: Callable[..., Any], cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve(replicas=1)
    kubectl("scale", "infsvc", "demo", "--replicas=2")
    await look("PodsStarting")
    deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    await look("PodsStopping")
    kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    found = await look("Suspended")
    assert found["status"]["replicas"] == 0
    assert "app.kubernetes.io/instance=demo" in found["status"]["selector"]
    assert await cluster.list_all(kinds.CLAIM, namespace)


async def test_a_service_that_is_gone_is_no_error(reconciler: Reconciler, namespace: str) -> None:
    assert await reconciler.reconcile(namespace, "nobody") is None


LATE = {"runtime": {"args": ["--seed", "7"]}, "rollout": {"progressDeadline": "2s"}}


async def test_a_revision_that_never_becomes_ready_is_rolled_back_and_can_be_tried_again(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    cluster: Cluster,
    namespace: str,
    engine: list[Object],
) -> None:
    first = await serve()
    good = first["status"]["revisions"]["current"]
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps({"spec": LATE}))
    back = await look("RolledBack")
    failed = back["status"]["revisions"]["failed"]
    assert condition(back, "Servable")["status"] == "True"
    assert f"Revision {failed} was given up" in condition(back, "Ready")["message"]
    deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert deployment is not None
    assert "--seed" not in str(deployment["spec"]["template"])
    ready = [pod for pod in await node.pods("engine") if is_ready(pod)]
    assert {pod["metadata"]["labels"]["pod-template-hash"] for pod in ready} == {good}
    kubectl("delete", "controllerrevision", f"demo-{failed}")
    await look("RollingOut")
    deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert deployment is not None
    assert "--seed" in str(deployment["spec"]["template"])


async def test_an_autoscaler_owns_the_replicas_once_it_sets_them(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
) -> None:
    await serve(replicas=2)

    async def replicas() -> int:
        deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert deployment is not None
        return int(deployment["spec"]["replicas"])

    scaling = {"spec": {"replicas": None, "autoscaling": {"min": 1, "max": 5}}}
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(scaling))
    await reconciler.reconcile(namespace, "demo")
    assert await replicas() == 2  # taking up autoscaling drops no pod
    assert await cluster.get(kinds.AUTOSCALER, namespace, "demo")
    kubectl("scale", "deployment", "demo", "--replicas=3")  # as the autoscaler does it
    for _ in range(2):
        await reconciler.reconcile(namespace, "demo")
    assert await replicas() == 3
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    await reconciler.reconcile(namespace, "demo")
    assert await replicas() == 0
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    await reconciler.reconcile(namespace, "demo")
    assert await replicas() == 1  # an autoscaler would leave 0 alone for ever
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"autoscaling": null}}')
    await reconciler.reconcile(namespace, "demo")
    assert await cluster.get(kinds.AUTOSCALER, namespace, "demo") is None


async def test_suspend_and_resume_while_another_model_is_fetched(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    eventually: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
) -> None:
    first = (await serve())["status"]["revisions"]["current"]

    def change(spec: Object) -> None:
        kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps({"spec": spec}))

    async def state() -> tuple[int, str]:
        found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert found is not None
        volume = found["spec"]["template"]["spec"]["volumes"][0]
        return found["spec"]["replicas"], volume["persistentVolumeClaim"]["claimName"]

    async def generation() -> int:
        found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert found is not None
        return int(found["metadata"]["generation"])

    _, old = await state()
    change({"model": {"uri": "hf://org/other"}})
    await look("Fetching")
    assert await state() == (1, old)
    change({"suspend": True})
    await look("Fetching")
    assert await state() == (0, old)
    change({"suspend": False})
    await look("Fetching")
    assert await state() == (1, old)  # the old model serves on while the new one is fetched
    before = await generation()
    for _ in range(3):
        await reconciler.reconcile(namespace, "demo")
    assert await generation() == before
    [pod] = [pod for pod in await eventually(lambda: node.pods("engine")) if not is_ready(pod)]
    assert pod["metadata"]["labels"]["pod-template-hash"] == first
    fetchers = await eventually(lambda: node.pods("fetch"))
    for fetcher in fetchers:
        node.end(fetcher, 0, REPORT)
    await look("RollingOut")
    replicas, new = await state()
    assert (replicas, new != old) == (1, True)


async def test_a_change_waits_for_idle_pods(
    serve: Callable[..., Any], look: Callable[..., Any], cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve(rollout={"waitForIdle": "1h"})
    change = {"spec": {"runtime": {"args": ["--seed", "7"]}}}
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(change))
    # The pods answer no /metrics here: what cannot be known counts as busy.
    waiting = await look("WaitingForIdle")
    assert waiting["status"]["revisions"]["waitingSince"]
    assert condition(waiting, "Servable")["status"] == "True"
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"rollout": {"waitForIdle": "0s"}}}')
    rolling = await look("RollingOut")
    assert "waitingSince" not in rolling["status"]["revisions"]
    deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert deployment is not None
    assert "--seed" in str(deployment["spec"]["template"])


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"model": {"uri": "pvc://weights/llama"}}, "InPlace"),
        ({"cache": {"pvc": {"existingClaim": "weights"}}}, "Published"),
    ],
)
async def test_a_claim_of_ones_own(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    eventually: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    spec: Object,
    status: str,
) -> None:
    await create("demo", placement=UNSCHEDULED, **spec)
    missing = await look("VolumeMissing")
    assert "weights" in condition(missing, "Ready")["message"]
    claim: Object = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}}
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    kubectl("create", "-f", "-", stdin=claim)
    await look("Fetching")
    before = await cluster.get(kinds.CLAIM, namespace, "weights")
    await node.fetch_all()
    found = await look("RollingOut")
    assert condition(found, "ModelCached")["reason"] == status
    assert found["status"]["cache"]["claim"] == "weights"
    kubectl("delete", "infsvc", "demo", "--cascade=foreground", "--timeout=30s")
    after = await cluster.get(kinds.CLAIM, namespace, "weights")
    assert before is not None
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert len(await cluster.list_all(kinds.CLAIM, namespace)) == 1
