"""What the status says where something else than a rollout befalls a service, on a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.reconcile import ApplyFailed, Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


@pytest.fixture
def merge(kubectl: Callable[..., str]) -> Callable[..., None]:
    def patch(name: str, body: Object) -> None:
        kubectl("patch", name, "--type=merge", "-p", json.dumps(body))

    return patch


async def stored(reconciler: Reconciler, namespace: str) -> Object:
    found = await reconciler.cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    return found


async def test_a_service_that_is_being_deleted_is_not_ready(
    serve: Callable[..., Any],
    reconciler: Reconciler,
    namespace: str,
    kubectl: Callable[..., str],
    merge: Callable[..., None],
) -> None:
    await serve()
    merge("infsvc/demo", {"metadata": {"finalizers": ["test.example/hold"]}})
    kubectl("delete", "infsvc", "demo", "--wait=false")
    await reconciler.reconcile(namespace, "demo")
    found = await stored(reconciler, namespace)
    assert (condition(found, "Ready")["status"], condition(found, "Ready")["reason"]) == ("False", "Deleting")
    assert condition(found, "Servable")["status"] == "True"  # its pod is still there
    kubectl("delete", "deployment", "demo", "--cascade=foreground", "--wait=false")
    kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    await reconciler.reconcile(namespace, "demo")
    found = await stored(reconciler, namespace)
    assert condition(found, "Servable")["status"] == "False"
    assert condition(found, "EndpointReady")["status"] == "False"
    assert kubectl("get", "jobs,deployments", "-o", "name", "--ignore-not-found").count("demo-fetch") <= 1
    merge("infsvc/demo", {"metadata": {"finalizers": None}})


async def test_a_refused_write_does_not_freeze_what_is_said_of_the_pods(
    serve: Callable[..., Any],
    reconciler: Reconciler,
    namespace: str,
    node: Node,
    merge: Callable[..., None],
) -> None:
    await serve()
    merge("infsvc/demo", {"spec": {"cache": {"pvc": {"size": "99Ti"}}}})  # no class here can grow volumes
    with pytest.raises(ApplyFailed):
        await reconciler.reconcile(namespace, "demo")
    found = await stored(reconciler, namespace)
    assert (condition(found, "Ready")["reason"], condition(found, "Servable")["status"]) == ("ApplyFailed", "True")
    [pod] = await node.pods("engine")
    node.patch(pod, {"conditions": [{"type": "Ready", "status": "False"}]})
    with pytest.raises(ApplyFailed):
        await reconciler.reconcile(namespace, "demo")
    found = await stored(reconciler, namespace)
    assert condition(found, "Servable")["status"] == "False"
    assert found["status"]["readyReplicas"] == 0


async def test_a_pod_that_a_kubelet_calls_ready_and_that_does_not_answer(
    serve: Callable[..., Any], look: Callable[..., Any], node: Node, engine: list[Object]
) -> None:
    await serve()
    [pod] = await node.pods("engine")

    def at(address: str) -> Object:
        return {"podIP": address, "podIPs": [{"ip": address}]}

    node.patch(pod, at("127.0.0.9"))
    found = await look("PodNotReady")
    assert "does not answer" in condition(found, "Ready")["message"]
    assert {condition(found, kind)["status"] for kind in ("Ready", "Servable", "EndpointReady")} == {"False"}
    node.patch(pod, at("127.0.0.1"))
    await look("Serving")


async def test_a_job_that_a_quota_keeps_from_making_its_pod_is_told(
    create: Callable[..., Any],
    reconciler: Reconciler,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kubectl("create", "-f", "-", stdin=quota)
    full = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    kubectl("patch", "quota", "none", "--subresource=status", "--type=merge", "-p", json.dumps(full))
    trial = ("run", "trial", "--image=i", "--dry-run=server")
    await eventually(lambda: "exceeded quota" in kubectl(*trial, check=False))
    await create("demo", placement=UNSCHEDULED)
    await reconciler.reconcile(namespace, "demo")
    await reconciler.reconcile(namespace, "demo")
    later = replace(reconciler, clock=lambda: datetime.now(UTC) + timedelta(minutes=1))
    await later.reconcile(namespace, "demo")
    ready = condition(await stored(reconciler, namespace), "Ready")
    assert ready["reason"] == "PodRefused"
    assert "ResourceQuota" in ready["message"]


@pytest.fixture
def newer_crd(kubectl: Callable[..., str]) -> Iterator[None]:
    """The CRD of a later version, which gives every object a field that this operator does not know."""
    name = ("crd", "inferenceservices.stoker.dev")
    older = json.loads(kubectl("get", *name, "-o", "json"))
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/warpFactor"
    field = {"type": "integer", "default": 9}
    kubectl("patch", *name, "--type=json", "-p", json.dumps([{"op": "add", "path": path, "value": field}]))
    yield
    kubectl("patch", *name, "--type=json", "-p", json.dumps([{"op": "remove", "path": path}]))
    assert "warpFactor" not in json.dumps(older)


async def test_a_crd_newer_than_the_operator_does_not_stop_who_serves(
    serve: Callable[..., Any],
    create: Callable[..., Any],
    look: Callable[..., Any],
    reconciler: Reconciler,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    await serve()
    request.getfixturevalue("newer_crd")

    async def defaulted() -> bool:
        return "warpFactor" in (await stored(reconciler, namespace))["spec"]

    await eventually(defaulted)
    kubectl("delete", "service", "demo")
    found = await look("Serving")
    said = condition(found, "Understood")
    assert (said["status"], said["reason"]) == ("False", "FieldsUnknown")
    assert "spec.warpFactor" in said["message"]
    assert kubectl("get", "service", "demo", "-o", "name")  # what it knows it goes on to look after
    await create("second")
    invalid = await look("SpecInvalid", "second")
    assert "spec.warpFactor" in condition(invalid, "Ready")["message"]
