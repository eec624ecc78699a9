"""Whose is what, on a real API server: what others add survives or goes, and what is theirs is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import UNSCHEDULED, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.reconcile import ApplyFailed, Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


async def test_other_writers_fields_survive(
    serve: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
) -> None:
    await serve()
    kubectl("scale", "deployment", "demo", "--replicas=3")
    kubectl("annotate", "deployment", "demo", "team=search")
    sidecar = {"spec": {"template": {"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}}}}
    kubectl("patch", "deployment", "demo", "-p", json.dumps(sidecar))
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", '{"spec": {"runtime": {"args": ["--seed", "7"]}}}')
    await reconciler.reconcile(namespace, "demo")
    found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert found is not None
    assert found["spec"]["replicas"] == 3
    assert found["metadata"]["annotations"]["team"] == "search"
    containers = {item["name"]: item for item in found["spec"]["template"]["spec"]["containers"]}
    assert containers["proxy"]["image"] == "proxy:1"
    assert containers["engine"]["args"][-2:] == ["--seed", "7"]
    await reconciler.reconcile(namespace, "demo")
    again = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert again is not None
    assert again["metadata"]["generation"] == found["metadata"]["generation"]


async def test_our_own_fields_are_restored(
    serve: Callable[..., Any], reconciler: Reconciler, cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve()
    kubectl("set", "image", "deployment/demo", "engine=evil:1")
    await reconciler.reconcile(namespace, "demo")
    found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert found is not None
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == "stoker/runtime:0.1.0"
    assert "another writer changed spec.template.spec.containers[name=engine].image; restored" in kubectl("events")


POLICY = {"spec": {"podSelector": {"matchLabels": {"only": "this"}}, "ingress": [{"from": [{"podSelector": {}}]}]}}
ENV = {"containers": [{"name": "engine", "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}]}
ADDITIONS: dict[str, tuple[str, Object, str]] = {
    # name: (the object, what another writer patches in, the path that the event names)
    "Service": ("service/demo", {"spec": {"selector": {"nobody": "none"}}}, "spec.selector"),
    "port": ("service/demo", {"spec": {"ports": [{"name": "debug", "port": 9999}]}}, "spec.ports"),
    "NetworkPolicy": ("networkpolicy/demo", POLICY, "spec"),
    "budget": ("pdb/demo", {"spec": {"selector": {"matchLabels": {"only": "this"}}}}, "spec.selector"),
    "env": ("deployment/demo", {"spec": {"template": {"spec": ENV}}}, "spec.template.spec.containers[name=engine].env"),
    "nodeSelector": (
        "deployment/demo", {"spec": {"template": {"spec": {"nodeSelector": {"disk": "slow"}}}}},
        "spec.template.spec.nodeSelector",
    ),
}  # fmt: skip


async def test_what_others_add_to_what_is_ours_alone_is_taken_out(
    serve: Callable[..., Any], reconciler: Reconciler, cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve()

    def spec(name: str) -> Object:
        found: Object = json.loads(kubectl("get", name, "-o", "json"))["spec"]
        return found

    for name, patch, path in ADDITIONS.values():
        before = spec(name)
        kubectl("patch", name, "--type=strategic", "-p", json.dumps(patch))
        assert spec(name) != before
        await reconciler.reconcile(namespace, "demo")
        assert spec(name) == before
        said = kubectl("events", "--for", "inferenceservice/demo")
        assert f"another writer added to {path}; restored" in said or f"another writer changed {path}" in said
        # A Deployment's status is its controller's to write, meanwhile too.
        stamp = "generation" if name.startswith("deployment") else "resourceVersion"
        after = kubectl("get", name, "-o", f"jsonpath={{.metadata.{stamp}}}")
        await reconciler.reconcile(namespace, "demo")
        assert kubectl("get", name, "-o", f"jsonpath={{.metadata.{stamp}}}") == after != ""


async def test_an_object_of_somebody_elses_is_left_alone_whatever_its_labels(
    serve: Callable[..., Any], reconciler: Reconciler, cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve()
    ours = json.loads(kubectl("get", "networkpolicy", "demo", "-o", "json"))
    labels = ours["metadata"]["labels"]
    for name, spec in (("theirs", ours["spec"]), ("more", ours["spec"])):
        body = {"apiVersion": ours["apiVersion"], "kind": ours["kind"], "metadata": {"name": name, "labels": labels}}
        kubectl("create", "-f", "-", stdin=body | {"spec": spec})
    pod = {"containers": [{"name": "engine", "image": "mine:1"}], **UNSCHEDULED}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mine", "labels": labels}, "spec": pod}
    kubectl("create", "-f", "-", stdin=body)
    await reconciler.reconcile(namespace, "demo")
    names = {item["metadata"]["name"] for item in await cluster.list_all(kinds.NETWORK_POLICY, namespace)}
    assert names == {"demo", "theirs", "more"}
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    assert (found["status"]["replicas"], condition(found, "Ready")["status"]) == (1, "True")


async def test_a_strangers_object_with_our_labels_is_not_taken_over(
    create: Callable[..., Any], reconciler: Reconciler, namespace: str, kubectl: Callable[..., str]
) -> None:
    labels = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "demo", "labels": labels}}
    kubectl("create", "-f", "-", stdin=body)
    await create("demo")
    with pytest.raises(ApplyFailed, match="ServiceAccount demo exists and is not this service's"):
        await reconciler.reconcile(namespace, "demo")


async def test_what_a_service_left_is_taken_up_by_one_of_its_name(
    create: Callable[..., Any], reconciler: Reconciler, cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await create("demo", placement=UNSCHEDULED)
    await reconciler.reconcile(namespace, "demo")
    kubectl("delete", "infsvc", "demo", "--cascade=orphan")
    again = await create("demo", placement=UNSCHEDULED)
    await reconciler.reconcile(namespace, "demo")
    found = await cluster.get(kinds.SERVICE, namespace, "demo")
    assert found is not None
    assert [item["uid"] for item in found["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]


async def test_a_strangers_object_is_not_taken_over(
    create: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
) -> None:
    kubectl("create", "service", "clusterip", "demo", "--tcp=80")
    before = await cluster.get(kinds.SERVICE, namespace, "demo")
    await create("demo")
    with pytest.raises(ApplyFailed, match="is not this service's"):
        await reconciler.reconcile(namespace, "demo")
    assert await cluster.get(kinds.SERVICE, namespace, "demo") == before
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    assert condition(found, "Ready")["reason"] == "ApplyFailed"
    assert "Service demo exists" in condition(found, "Ready")["message"]
    for kind in (kinds.SERVICE_ACCOUNT, kinds.CLAIM, kinds.NETWORK_POLICY, kinds.DISRUPTION_BUDGET):
        assert not await cluster.list_all(kind, namespace), f"a {kind.kind} was made before the names were looked up"
    kubectl("delete", "service", "demo")
    await reconciler.reconcile(namespace, "demo")
    assert "stoker" in kubectl("get", "service", "demo", "-o", "jsonpath={.metadata.labels}")


async def test_a_strangers_name_keeps_nothing_else_of_a_running_service_from_being_made(
    serve: Callable[..., Any], reconciler: Reconciler, cluster: Cluster, namespace: str, kubectl: Callable[..., str]
) -> None:
    await serve()
    kubectl("delete", "networkpolicy/demo", "deployment/demo", "--wait=true")
    body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "demo"}}
    kubectl("create", "-f", "-", stdin=body | {"spec": {"podSelector": {}}})
    with pytest.raises(ApplyFailed, match="NetworkPolicy demo exists and is not this service's"):
        await reconciler.reconcile(namespace, "demo")
    assert await cluster.get(kinds.DEPLOYMENT, namespace, "demo") is not None
