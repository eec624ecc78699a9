"""The InferenceServices: made, changed, looked at; and what has been written to them and their children.

Invariants: that nothing was written is read off the resourceVersions of every object, Leases apart.
Knows nothing of how pods are simulated and of the operator's counters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

NAMESPACES = 20
# For so long nothing happens before it counts as quiet.
QUIET_SECONDS = 6.0
_WRITTEN = (
    kinds.INFERENCE_SERVICE, kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.CLAIM, kinds.POD, kinds.EVENT,
    kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.CONTROLLER_REVISION, kinds.JOB, kinds.DISRUPTION_BUDGET,
    kinds.AUTOSCALER, kinds.NETWORK_POLICY,
)  # fmt: skip


async def create(cluster: Cluster, count: int, pods: int) -> None:
    """Make the services, of so many pods each, spread over a few namespaces."""

    async def one(number: int) -> None:
        spec = {"model": {"uri": f"hf://org/model-{number}"}, "resources": {"gpus": 1}, "replicas": pods}
        meta = {"name": f"service-{number}", "namespace": f"scale-{number % NAMESPACES}"}
        head = {"apiVersion": kinds.INFERENCE_SERVICE.api_version, "kind": kinds.INFERENCE_SERVICE.kind}
        await cluster.create(kinds.INFERENCE_SERVICE, head | {"metadata": meta, "spec": spec})

    await asyncio.gather(*(one(number) for number in range(count)))


async def change(cluster: Cluster, count: int) -> None:
    """Roll out another argument of some services: one that no earlier run over the same state gave them."""
    queued = str(100 + int(time.time()) % 100_000)

    async def one(number: int) -> None:
        name = f"service-{number}"
        there = await cluster.get(kinds.INFERENCE_SERVICE, f"scale-{number % NAMESPACES}", name)
        if there is None:
            raise SystemExit(f"{name} is gone")
        changed = there["spec"] | {"runtime": {"args": ["--max-queued", queued]}}
        await cluster.replace(kinds.INFERENCE_SERVICE, there | {"spec": changed})

    await asyncio.gather(*(one(number) for number in range(count)))


async def count_services(cluster: Cluster) -> int:
    """How many there are."""
    return sum([len(items) async for items, _ in cluster.pages(kinds.INFERENCE_SERVICE, "", "")])


async def settled(cluster: Cluster, count: int) -> bool:
    """Whether every service is Ready in its newest generation."""
    ready = 0
    async for services, _ in cluster.pages(kinds.INFERENCE_SERVICE, "", ""):
        for item in services:
            conditions = {entry["type"]: entry for entry in item.get("status", {}).get("conditions", ())}
            there = conditions.get("Ready", {})
            ready += there.get("status") == "True" and there["observedGeneration"] == item["metadata"]["generation"]
    return ready == count


async def versions(cluster: Cluster, *, events: bool = True) -> dict[str, str]:
    """The resourceVersion of everything that the operator writes: any write to any of it changes it."""
    found = {}
    for kind in _WRITTEN if events else [each for each in _WRITTEN if each is not kinds.EVENT]:
        async for items, _ in cluster.pages(kind, "", ""):
            for item in items:
                # Kubernetes' own controllers repeat and forget their events.
                if kind is not kinds.EVENT or item.get("reportingComponent") == "stoker.dev/operator":
                    found[item["metadata"]["uid"]] = item["metadata"]["resourceVersion"]
    return found


async def still(cluster: Cluster) -> dict[str, str]:
    """`versions`, once Kubernetes' own controllers have written what they had to."""
    found = await versions(cluster)
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        again = await versions(cluster)
        if again == found:
            return again
        found = again


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """How many objects were written or deleted between two looks."""
    return len(before.keys() ^ after.keys()) + sum(before[uid] != after[uid] for uid in before.keys() & after.keys())
