"""KV events of a service that serves already: asked for, they are a rollout and an opening of its policy; taken away,
another one, after which nothing of them is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import Node

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
POOL = {"endpointPickerRef": {"name": "epp"}}


async def test_they_come_and_go_with_their_field(
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    engine: list[Object],
) -> None:
    async def asked(pool: Object) -> None:
        await cluster.merge(kinds.INFERENCE_SERVICE, namespace, "demo", {"spec": {"endpoint": {"inferencePool": pool}}})

    async def told() -> tuple[list[int], list[int], bool]:
        """Ports beside the API's, of the pods' template and of the policy, and whether the engine is told of events."""
        workload = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        policy = await cluster.get(kinds.NETWORK_POLICY, namespace, "demo")
        assert workload is not None
        assert policy is not None
        [container] = workload["spec"]["template"]["spec"]["containers"]
        ports = [port["containerPort"] for port in container["ports"]]
        opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        return ports[1:], opened[1:], "--kv-events-config" in container["args"]

    first = await serve(endpoint={"inferencePool": POOL})
    before = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert before is not None
    assert await told() == ([], [], False)
    await asked({"kvEvents": {"port": 7117}})
    await look("RollingOut")
    await node.run_all(2)  # the old pod, still there, and the new one
    second = await look("Serving")
    assert second["status"]["revisions"]["current"] != first["status"]["revisions"]["current"]
    assert await told() == ([7117], [7117], True)
    await reconciler.reconcile(namespace, "demo")  # the old pod may have been there when it was looked at last
    written = await versions(cluster, namespace)
    for _ in range(3):
        await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == written, "what the API server adds is no change"
    await asked({"kvEvents": None})
    await look("RollingOut")
    assert await told() == ([], [], False)
    after = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert after is not None
    assert after["spec"]["template"] == before["spec"]["template"], "the template that it had"
