"""All that a service may have made in a namespace, and at which version it is."""

from __future__ import annotations

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

EVERY_KIND = (
    kinds.INFERENCE_SERVICE,
    kinds.SERVICE_ACCOUNT,
    kinds.SERVICE,
    kinds.CLAIM,
    kinds.POD,
    kinds.EVENT,
    kinds.DEPLOYMENT,
    kinds.REPLICA_SET,
    kinds.JOB,
    kinds.DISRUPTION_BUDGET,
    kinds.CONTROLLER_REVISION,
    kinds.NETWORK_POLICY,
    kinds.AUTOSCALER,
)


async def versions(cluster: Cluster, namespace: str) -> dict[tuple[str, str], str]:
    """The resourceVersion of everything in the namespace: any write to anything changes it."""
    found = {}
    for kind in EVERY_KIND:
        for item in await cluster.list_all(kind, namespace):
            found[kind.kind, item["metadata"]["name"]] = item["metadata"]["resourceVersion"]
    return found
