"""Copies on nodes' own disks on a real API server: who has one is said as soon as a pod reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import REPORT, UNSCHEDULED, Node

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import copies
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


@pytest.fixture
def reconciler(cluster: Cluster) -> Reconciler:
    return Reconciler(cluster, PodClient(2.0), Settings(node_cache_class="copies"))


async def test_a_node_counts_from_the_first_pod_that_reads_its_copy(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    bare_node: str,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    engine: list[Object],
) -> None:
    await create("demo", placement=UNSCHEDULED, cache={"mode": "Node"})
    await look("Fetching")
    await node.fetch_all()
    await look("RollingOut")
    [pod] = await eventually(lambda: node.pods("engine"))
    node.bind(pod, bare_node)
    claim = await asked(cluster, namespace, pod, bare_node)
    waits = await look("FillingNode")
    assert waits["status"]["cache"]["nodes"] == 0, "its agent has served nobody"

    # The agent serves the claim, and labels the node only after: who looked at the nodes a moment ago does not see it.
    await cluster.merge(kinds.CLAIM, namespace, claim, {"spec": {"volumeName": "stoker-any"}})
    node.run(pod)
    assert (await look("Serving"))["status"]["cache"]["nodes"] == 1
    label = copies.copy_label(namespace, REPORT["digest"])  # type: ignore[arg-type]
    kubectl("label", "node", bare_node, f"{label}=true")
    anew = Reconciler(await Cluster.connect(), PodClient(2.0), Settings(node_cache_class="copies"))
    await anew.reconcile(namespace, "demo")
    await anew.cluster.close()
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    assert found["status"]["cache"]["nodes"] == 1, "a node counts once"


async def asked(cluster: Cluster, namespace: str, pod: Object, node: str) -> str:
    """What the ephemeral volume controller and the scheduler make of a pod's volume; the claim's name."""
    [template] = [
        volume["ephemeral"]["volumeClaimTemplate"] for volume in pod["spec"]["volumes"] if "ephemeral" in volume
    ]
    name = f"{pod['metadata']['name']}-models"
    notes = template["metadata"]["annotations"] | {copies.SELECTED_NODE: node}
    meta = template["metadata"] | {"name": name, "namespace": namespace, "annotations": notes}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": template["spec"]}
    await cluster.create(kinds.CLAIM, claim)
    return name
