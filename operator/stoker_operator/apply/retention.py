"""Carries out what plan/retention.py decides of the cache volumes that outlive their last use.

Invariants: only claims that carry a wish to be retained are looked at; a claim deleted meanwhile is not made anew by a
note on it.
Knows nothing of when a volume's time is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from stoker_operator import metrics
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import retain_seconds
from stoker_operator.manifests.identity import CACHE_LABEL, MANAGED_BY
from stoker_operator.plan.retention import UNUSED_SINCE, End, Note, claims_in_use, plan_retention

log = logging.getLogger("stoker.operator")
Object = Mapping[str, Any]
# The note is nobody else's field, so taking it back is an apply without it.
FIELD_MANAGER = "stoker-operator-retention"


async def sweep(cluster: Cluster, namespace: str, now: datetime | None = None, without: Collection[str] = ()) -> None:
    """Look at every cache claim of a namespace ("": of all but those of `without`). Raises ApiError."""
    ours = f"{MANAGED_BY}=stoker"
    found: set[str] = set()
    async for claims, _ in cluster.pages(kinds.CLAIM, namespace, CACHE_LABEL):
        found |= {str(claim["metadata"]["namespace"]) for claim in claims if retain_seconds(claim)}
    # One namespace at a time: a cluster's pods, taken apart at once, are more than the operator may hold.
    for where in sorted(found - set(without)):
        kept, services, deployments, pods = await asyncio.gather(
            cluster.list_all(kinds.CLAIM, where, CACHE_LABEL),
            cluster.list_all(kinds.INFERENCE_SERVICE, where),
            cluster.list_all(kinds.DEPLOYMENT, where, ours),
            cluster.list_all(kinds.POD, where, ours),
        )
        for step in plan_retention(kept, claims_in_use(services, deployments, pods), now or datetime.now(UTC)):
            await _carry_out(cluster, step)


async def _carry_out(cluster: Cluster, step: Note | End) -> None:
    meta = step.claim["metadata"]
    if isinstance(step, End):
        log.info("%s: deleting volume %s: %s", meta["namespace"], meta["name"], step.reason)
        await cluster.delete(kinds.CLAIM, meta["namespace"], meta["name"], meta["uid"])
        metrics.ACTIONS.labels(verb="delete", kind=kinds.CLAIM.kind).inc()
        return
    log.info("%s: volume %s is %s", meta["namespace"], meta["name"], "unused" if step.since else "used again")
    annotations = {UNUSED_SINCE: step.since} if step.since else {}
    # With the uid, so that a claim deleted meanwhile is not made anew.
    head = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"], "annotations": annotations}
    manifest = {"apiVersion": kinds.CLAIM.api_version, "kind": kinds.CLAIM.kind, "metadata": head}
    await cluster.apply(kinds.CLAIM, manifest, manager=FIELD_MANAGER)
