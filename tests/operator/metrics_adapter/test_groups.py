"""A real HorizontalPodAutoscaler that scales groups of pods, under the controller that their publisher has for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import LEADER_WORKER_SET
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
QUEUED = 6


@pytest.mark.usefixtures("published", "registration")
async def test_an_autoscaler_counts_groups_and_asks_their_leaders_alone(
    namespace: str, service: Callable[..., InferenceService], model: FetchedModel, cluster: Cluster,
    ask: Callable[..., Any], engines: dict[str, float], eventually: Callable[..., Any],
) -> None:  # fmt: skip
    """Every pod here says that so many requests wait. Whoever counted the pods that only compute would see thrice as
    many, and make groups where each has just what it is to have.
    """
    fast = {"stabilization": "0s", "maxPods": 4, "period": "1s"}
    rates = {"scaleUp": fast, "scaleDown": fast, "targets": {"queued": QUEUED}}
    built = service(
        "demo",
        resources={"gpus": 0, "nodes": 3},
        parallelism={"pipeline": 3},
        autoscaling={"min": 1, "max": 5, **rates},
        placement={"schedulerName": "nobody"},
    )
    assert built.autoscaling is not None
    wanted = manifests.workload_manifest(built, Settings(), model, first_variant(built))
    for manifest in (
        manifests.service_account(built),
        manifests.group_service(built),
        wanted,
        manifests.pod_autoscaler(built, built.autoscaling, wanted),
    ):
        manifest["metadata"] = {k: v for k, v in manifest["metadata"].items() if k != "ownerReferences"}
        manifest["metadata"]["namespace"] = namespace
        await cluster.apply(kinds.BY_NAME[manifest["kind"]], manifest)

    async def groups() -> int:
        """So many are wanted; all of their pods run."""
        for pod in await cluster.list_all(kinds.POD, namespace):
            status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            if pod["status"].get("phase") != "Running":
                meta = {"name": pod["metadata"]["name"], "namespace": namespace}
                told = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
                await cluster.apply(kinds.POD, told, subresource="status")
        live = await cluster.get(LEADER_WORKER_SET, namespace, "demo-nodes")
        assert live is not None
        return int(live["spec"]["replicas"])

    async def measured(average: str) -> Object | None:
        """What the autoscaler has seen, once it saw this average of one group's three pods."""
        await groups()
        found = json.loads(await ask("get", "hpa", "demo", "-o", "json"))["status"]
        values = [item["pods"]["current"] for item in found.get("currentMetrics") or () if "pods" in item]
        there = len(await cluster.list_all(kinds.POD, namespace)) == 3
        return found if there and {"averageValue": average} in values else None

    engines["waiting"] = QUEUED
    status = await eventually(lambda: measured(str(QUEUED)))
    for _ in range(8):
        assert (await groups(), status["currentReplicas"], status["desiredReplicas"]) == (1, 1, 1)
        await asyncio.sleep(0.5)
        status = await measured(str(QUEUED)) or status
    engines["waiting"] = 3 * QUEUED

    async def at(count: int) -> bool:
        return await groups() == count and len(await cluster.list_all(kinds.POD, namespace)) == 3 * count

    await eventually(lambda: at(5))  # never above max, whatever the queue
    engines["waiting"] = 0.0
    await eventually(lambda: at(1))
