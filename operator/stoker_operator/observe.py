"""One immutable snapshot of everything a plan may depend on: the children, the pods, what the pods say.

Invariants: reads only; every object is read in the same reconcile that uses it, so nothing is decided from
an event or from memory; a revision that already answered is not asked again.
Knows nothing of what should be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from stoker_operator import cluster as kinds
from stoker_operator import rollout
from stoker_operator.cluster import Cluster, Kind
from stoker_operator.manifests import claim_name, source_id
from stoker_operator.manifests.identity import COMPONENT, INSTANCE, MANAGED_BY, SOURCE_LABEL
from stoker_operator.pod_http import PodClient
from stoker_operator.rollout import Rollout
from stoker_operator.snapshot import Answer, Observed, Progress
from stoker_operator.spec import InferenceService

Object = Mapping[str, Any]
CHILDREN = (
    kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.POD, kinds.JOB,
    kinds.DISRUPTION_BUDGET,
)  # fmt: skip


async def observe(cluster: Cluster, pods: PodClient, service: InferenceService) -> Observed:
    """Read the children by label and ask the pods that matter. Raises ApiError when the API server refuses."""
    ours = f"{MANAGED_BY}=stoker,{INSTANCE}={service.name}"
    lists = await asyncio.gather(
        *(cluster.list_all(kind, service.namespace, ours) for kind in CHILDREN),
        cluster.list_all(kinds.CLAIM, service.namespace, f"{MANAGED_BY}=stoker"),
    )
    by_kind: dict[Kind, list[dict[str, Any]]] = dict(zip((*CHILDREN, kinds.CLAIM), lists, strict=True))
    children = {(kind.kind, item["metadata"]["name"]): item for kind, items in by_kind.items() for item in items}
    engine_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "engine")
    fetch_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "fetch")
    deployment = children.get(("Deployment", service.name))
    state = rollout.read(deployment, by_kind[kinds.REPLICA_SET], engine_pods)
    claim = children.get(("PersistentVolumeClaim", claim_name(service)))
    progress, answer = await asyncio.gather(
        _progress(pods, service, claim, fetch_pods), _answer(pods, service, state, engine_pods)
    )
    return Observed(
        children=children,
        claims=tuple(by_kind[kinds.CLAIM]),
        engine_pods=engine_pods,
        fetch_pods=fetch_pods,
        jobs=tuple(by_kind[kinds.JOB]),
        rollout=state,
        progress=progress,
        answer=answer,
    )


def _component(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))


def _address(pod: Object, port_name: str) -> tuple[str, int] | None:
    """(IP, port) of a container's named port; None while the pod has no address."""
    ip = str(pod.get("status", {}).get("podIP") or "")
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == port_name and ip:
                return ip, int(port["containerPort"])
    return None


async def _progress(
    pods: PodClient, service: InferenceService, claim: Object | None, fetch_pods: tuple[Object, ...]
) -> Progress | None:
    if claim is None:
        return None
    source = source_id(service, claim["metadata"]["uid"])
    for pod in fetch_pods:
        running = pod.get("status", {}).get("phase") == "Running" and not rollout.is_terminating(pod)
        address = _address(pod, "progress")
        if running and address and pod["metadata"]["labels"].get(SOURCE_LABEL) == source:
            return await pods.progress(*address)
    return None


async def _answer(
    pods: PodClient, service: InferenceService, state: Rollout, engine_pods: tuple[Object, ...]
) -> Answer | None:
    """Ask one ready pod of the current revision, unless that revision is known to have answered."""
    answered = (service.status.get("revisions") or {}).get("answered")
    if not state.current or answered == state.current:
        return None
    for pod in engine_pods:
        fresh = rollout.template_hash(pod) == state.current and not rollout.is_terminating(pod)
        address = _address(pod, "http")
        if fresh and rollout.is_ready(pod) and address:
            error = await pods.complete(*address, model=service.served_names[0])
            return Answer(pod["metadata"]["name"], state.current, error)
    return None
