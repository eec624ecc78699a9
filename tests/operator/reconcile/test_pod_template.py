"""What podTemplate and resources.claims become on a real API server that enforces the restricted profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import Node

from stoker_operator.cluster.api import Cluster
from stoker_operator.reconcile import ApplyFailed, Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
TEMPLATE: Object = {
    "securityContext": {"runAsUser": 4711, "supplementalGroups": [9]},
    "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1000Mi"}}],
    "containers": [
        {"name": "engine", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
        {
            "name": "proxy",
            "image": "proxy:1",
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "ports": [{"containerPort": 9090}],
            "resources": {"requests": {"cpu": "1000m"}, "limits": {"memory": "1024Mi"}},
            "readinessProbe": {"tcpSocket": {"port": 9090}},
        },
    ],
    "initContainers": [{"name": "before", "image": "before:1", "restartPolicy": "Always"}],
}


async def test_what_is_merged_runs_in_a_restricted_namespace_and_is_written_once(
    serve: Callable[..., Any],
    kubectl: Callable[..., str],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    node: Node,
) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    await serve("demo", podTemplate={"spec": TEMPLATE}, resources={"claims": claims})
    [pod] = await node.pods("engine")
    assert [item["name"] for item in pod["spec"]["containers"]] == ["engine", "proxy"]
    assert [item["name"] for item in pod["spec"]["initContainers"]] == ["verify", "before"]
    assert pod["spec"]["securityContext"]["runAsUser"] == 4711
    assert pod["spec"]["resourceClaims"] == claims
    assert len(pod["spec"]["topologySpreadConstraints"]) == 2
    before = await versions(cluster, namespace)
    await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == before


async def test_a_field_that_no_container_has_is_named(
    serve: Callable[..., Any], kubectl: Callable[..., str], reconciler: Reconciler, namespace: str
) -> None:
    await serve("demo")
    containers = [{"name": "p", "image": "x", "lifecycle": {"preStpo": {}}}]
    patch = {"spec": {"podTemplate": {"spec": {"containers": containers}}}}
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(patch))
    with pytest.raises(ApplyFailed, match="preStpo"):
        await reconciler.reconcile(namespace, "demo")
