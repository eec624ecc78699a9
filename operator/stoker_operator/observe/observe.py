"""One immutable snapshot of everything a plan may depend on: the children, the pods, what the pods say.

Invariants: reads only; every object is read in the same reconcile that uses it, so nothing is decided from
an event or from memory; a revision that already answered is not asked again.
Knows nothing of what should be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests import claim_name, owns_claim, source_id
from stoker_operator.manifests.canary import COMPONENT_NAME, canary_name, known_canary
from stoker_operator.manifests.fetching.fill import COMPONENT_NAME as FILL
from stoker_operator.manifests.groups.nodes import index_of
from stoker_operator.manifests.identity import COMPONENT, INSTANCE, MANAGED_BY, SOURCE_LABEL, WORKER
from stoker_operator.manifests.pod import placement
from stoker_operator.manifests.scaling import QUEUED, RUNNING
from stoker_operator.observe import capacity, rollout
from stoker_operator.observe.capacity import Room
from stoker_operator.observe.comparison import SAMPLED_PODS, Counters, read_counters
from stoker_operator.observe.gauges import idle_seconds
from stoker_operator.observe.gauges import parse as parse_gauges
from stoker_operator.observe.gpu import Gpu, LargestGpus
from stoker_operator.observe.groups import members, read_groups
from stoker_operator.observe.pod_http import PodClient, pod_address
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import (
    AdapterReport,
    Answer,
    Beside,
    Children,
    Idle,
    Observed,
    Progress,
    workload_of,
)
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
CHILDREN = (
    kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.POD, kinds.JOB,
    kinds.DISRUPTION_BUDGET, kinds.AUTOSCALER, kinds.CONTROLLER_REVISION, kinds.NETWORK_POLICY, kinds.INGRESS,
    kinds.ENDPOINT_SLICE,
)  # fmt: skip


async def kinds_read(cluster: Cluster, without: frozenset[str]) -> tuple[Kind, ...]:
    """The kinds of children that a reconcile reads, but for claims. Raises ApiError."""
    served = await cluster.served([kind for kind in kinds.OPTIONAL if kind.kind not in without])
    wanted = (*CHILDREN, *(kind for kind in kinds.OPTIONAL if kind.kind in served))
    dashboards = kinds.POD_MONITOR.kind in served and "Dashboard" not in without  # made for the same clusters
    if dashboards or "AdapterList" not in without:
        wanted += (kinds.CONFIG_MAP,)
    return tuple(kind for kind in wanted if kind.kind not in without)


async def observe(
    cluster: Cluster, pods: PodClient, service: InferenceService, without: frozenset[str] = frozenset()
) -> Observed:
    """Read the children by label and ask the pods that matter; nobody has a right to kinds that are named in `without`.

    Raises ApiError when the API server refuses.
    """
    ours = f"{MANAGED_BY}=stoker,{INSTANCE}={service.name}"
    wanted = await kinds_read(cluster, without)
    found = await cluster.together(wanted, service.namespace, ours)
    claims = await cluster.concerning(kinds.CLAIM, service.namespace, service.name)
    by_kind = _owned(found, service.uid)
    own = {(kind.kind, item["metadata"]["name"]): item for kind, items in by_kind.items() for item in items}
    children = Children(own, await cluster.by_name(kinds.CLAIM, service.namespace))
    engine_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "engine")
    fetch_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "fetch")
    fill_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == FILL)
    verify_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "verify")
    lookup_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == "lookup")
    worker_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == WORKER)
    workload = workload_of(children, service)
    scaling = service.autoscaling
    floor = scaling.floor if scaling is not None and scaling.ours else None
    canary_pods = tuple(pod for pod in by_kind[kinds.POD] if _component(pod) == COMPONENT_NAME)
    words = await pod_words(pods, (*engine_pods, *canary_pods))
    silent = frozenset(name for name, word in words.items() if word is None)
    state = _state(workload, by_kind, engine_pods, worker_pods, floor, silent)
    for each in (service, service.as_canary):
        own |= await _claim(cluster, each, children)
    answered = str((service.status.get("revisions") or {}).get("answered", ""))
    progress, answer, beside, adapters = await asyncio.gather(
        _progress(pods, service, children, fetch_pods),
        _answer(pods, service, answered, state, _heard(engine_pods, silent)),
        _beside(pods, service, children, by_kind, _heard(canary_pods, silent), fetch_pods),
        _adapters(pods, service, engine_pods),
    )
    return Observed(
        children=children,
        claims=tuple(claims),
        engine_pods=engine_pods,
        fetch_pods=fetch_pods,
        verify_pods=verify_pods,
        lookup_pods=lookup_pods,
        fill_pods=fill_pods,
        jobs=tuple(by_kind[kinds.JOB]),
        revisions=tuple(by_kind[kinds.CONTROLLER_REVISION]),
        rollout=state,
        served=frozenset(kind.kind for kind in wanted if kind in kinds.OPTIONAL),
        without=without,
        progress=progress,
        answer=answer,
        silent=silent,
        warnings={pod["metadata"]["name"]: word for pod in engine_pods if (word := words.get(pod["metadata"]["name"]))},
        canary=replace(beside, pods=canary_pods),
        adapters=adapters,
        worker_pods=worker_pods,
    )


def _state(
    workload: Object | None,
    by_kind: Mapping[Kind, list[dict[str, Any]]],
    engine_pods: Sequence[Object],
    worker_pods: Sequence[Object],
    floor: int | None,
    silent: Container[str],
) -> Rollout:
    """The rollout of the workload, by its kind."""
    if workload is not None and workload["kind"] == kinds.LEADER_WORKER_SET.kind:
        return read_groups(workload, engine_pods, worker_pods, floor, silent)
    return rollout.read(workload, by_kind[kinds.REPLICA_SET], engine_pods, floor, silent)


async def _claim(
    cluster: Cluster, service: InferenceService, children: Mapping[tuple[str, str], Object]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The service's claim where it is one of the user's own, which no label tells of."""
    key = ("PersistentVolumeClaim", claim_name(service))
    if key in children or owns_claim(service) or not service.cache.has_volume:
        return {}
    found = await cluster.get(kinds.CLAIM, service.namespace, claim_name(service))
    return {key: found} if found is not None else {}


async def _beside(
    pods: PodClient,
    service: InferenceService,
    children: Mapping[tuple[str, str], Object],
    by_kind: Mapping[Kind, list[dict[str, Any]]],
    canary_pods: list[Object],
    fetch_pods: tuple[Object, ...],
) -> Beside:
    """What there is of a canary."""
    deployment = children.get(("Deployment", canary_name(service)))
    if service.canary is None or deployment is None:
        progress = await _progress(pods, service.as_canary, children, fetch_pods) if service.canary else None
        return Beside(progress=progress)
    state = rollout.read(deployment, by_kind[kinds.REPLICA_SET], canary_pods)
    answered = str(known_canary(service).get("answered", ""))
    return Beside(
        rollout=state,
        answer=await _answer(pods, service, answered, state, canary_pods),
        progress=await _progress(pods, service.as_canary, children, fetch_pods),
    )


def _heard(pods: Iterable[Object], silent: Container[str]) -> list[Object]:
    """The pods that are not known to be silent."""
    return [pod for pod in pods if pod["metadata"]["name"] not in silent]


async def observe_pods(
    cluster: Cluster, pods: PodClient, namespace: str, name: str, uid: str, without: frozenset[str] = frozenset()
) -> Rollout:
    """The pods of a service whose spec nobody can read, or that is being deleted. Raises ApiError."""
    served = await cluster.served([kinds.LEADER_WORKER_SET] if kinds.LEADER_WORKER_SET.kind not in without else [])
    wanted = (kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.POD, *([kinds.LEADER_WORKER_SET] if served else []))
    ours = f"{MANAGED_BY}=stoker,{INSTANCE}={name}"
    found = _owned(await cluster.together(wanted, namespace, ours), uid)
    workloads = (*found.get(kinds.LEADER_WORKER_SET, ()), *found[kinds.DEPLOYMENT])
    workload = next((item for item in workloads if item["metadata"]["name"] != f"{name}-{COMPONENT_NAME}"), None)
    engine_pods = [pod for pod in found[kinds.POD] if _component(pod) not in (COMPONENT_NAME, WORKER)]
    words = await pod_words(pods, engine_pods)
    silent = [name for name, word in words.items() if word is None]
    workers = [pod for pod in found[kinds.POD] if _component(pod) == WORKER]
    return _state(workload, found, engine_pods, workers, None, silent)


async def _adapters(
    pods: PodClient, service: InferenceService, engine_pods: Iterable[Object]
) -> dict[str, tuple[AdapterReport, ...]]:
    """What each ready pod says of its adapters, where the spec speaks of any."""
    if service.model.adapters is None:
        return {}
    ready = [pod for pod in engine_pods if rollout.is_ready(pod) and not rollout.is_terminating(pod)]
    addresses = {pod["metadata"]["name"]: pod_address(pod, "http") for pod in ready}
    asked = {name: address for name, address in addresses.items() if address is not None}
    said = await asyncio.gather(*(pods.adapters(address) for address in asked.values()))
    return {name: reports for name, reports in zip(asked, said, strict=True) if reports is not None}


async def pod_words(pods: PodClient, engine_pods: Iterable[Object]) -> dict[str, str | None]:
    """What each pod that is said to be ready says is wrong, "" = nothing; None = it does not answer: a kubelet that
    hangs goes on saying ready.
    """
    ready = [pod for pod in engine_pods if rollout.is_ready(pod) and not rollout.is_terminating(pod)]
    addresses = {pod["metadata"]["name"]: pod_address(pod, "http") for pod in ready}
    asked = {name: address for name, address in addresses.items() if address is not None}
    return dict(zip(asked, await pods.words(list(asked.values())), strict=True))


def _owned(by_kind: Mapping[Kind, list[dict[str, Any]]], uid: str) -> dict[Kind, list[dict[str, Any]]]:
    """The objects that the service owns, by its uid: directly, or through its Deployment, its groups and its Jobs.
    Labels only say where to look: anybody may write them on what is his.
    """

    def of(kind: Kind, owners: set[str]) -> list[dict[str, Any]]:
        return [item for item in by_kind.get(kind, ()) if owners & {reference["uid"] for reference in _owners(item)}]

    found = {kind: of(kind, {uid}) for kind in by_kind}
    found[kinds.REPLICA_SET] = of(kinds.REPLICA_SET, _uids(found[kinds.DEPLOYMENT]))
    found[kinds.POD] = of(kinds.POD, _uids(found[kinds.REPLICA_SET]) | _uids(found.get(kinds.JOB, ())))
    sets = {str(item["metadata"]["name"]) for item in found.get(kinds.LEADER_WORKER_SET, ())}
    found[kinds.POD] += members(by_kind.get(kinds.POD, ()), sets)
    return found


def _owners(item: Object) -> list[Object]:
    return item["metadata"].get("ownerReferences") or []


def _uids(items: Iterable[Object]) -> set[str]:
    return {str(item["metadata"]["uid"]) for item in items}


async def room_for(cluster: Cluster, observed: Observed, asked: Sequence[Object]) -> Room | None:
    """Where one more replica could go, whose pods have the specs `asked`: beside the pods that run, or in the place of
    one replica; None where nobody tells of nodes. Raises ApiError.
    """
    nodes = await cluster.list_all(kinds.NODE, "")
    if not nodes:
        return None
    replicas: dict[str, set[str]] = {}
    for pod in observed.serving_pods:
        if not rollout.is_terminating(pod) and not rollout.is_finished(pod):
            meta = pod["metadata"]
            replicas.setdefault(index_of(pod) or str(meta["name"]), set()).add(str(meta["uid"]))
    there: dict[str, list[Object]] = {}
    waiting: list[Object] | None = None
    for node in capacity.candidates(asked[0], nodes):
        there[node["metadata"]["name"]] = list(await cluster.pods_on(node["metadata"]["name"]))
        if capacity.places(asked, nodes, there):
            waiting = await _waiting(cluster, observed) if waiting is None else waiting
            if capacity.places(asked, nodes, capacity.filled(waiting, nodes, there)):
                return Room(spare=True, freed=True)
    left = ({name: _but(pods, leaving) for name, pods in there.items()} for leaving in replicas.values())
    return Room(spare=False, freed=any(capacity.places(asked, nodes, pods) for pods in left))


async def _waiting(cluster: Cluster, observed: Observed) -> list[Object]:
    """The pods of others that wait for a node and do not stand behind this service's, the oldest first."""
    own = {pod["metadata"]["uid"] for pod in observed.serving_pods}
    priority = max((int(pod["spec"].get("priority") or 0) for pod in observed.serving_pods), default=0)
    found = [pod for pod in await cluster.pods_on("") if pod["metadata"]["uid"] not in own]
    promised = (pod for pod in found if capacity.is_promised(pod, priority))
    return sorted(promised, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def _but(pods: Iterable[Object], leaving: Container[str]) -> list[Object]:
    return [pod for pod in pods if pod["metadata"]["uid"] not in leaving]


async def gpu_to_get(cluster: Cluster, service: InferenceService, known: LargestGpus) -> Gpu:
    """The largest GPU of the nodes that a pod of this service may run on. Raises ApiError."""
    return known.of(await cluster.recent(kinds.NODE), placement(service), service.resources.gpu_resource)


async def load(pods: PodClient, observed: Observed) -> int:
    """How many requests the ready pods have, running and queued. A pod that does not say counts as one request."""
    ready = [pod for pod in observed.engine_pods if rollout.is_ready(pod) and not rollout.is_terminating(pod)]
    addresses = [pod_address(pod, "http") for pod in ready]
    pages = await asyncio.gather(*(pods.page(address, "/metrics") for address in addresses if address))
    return sum(map(_requests, pages)) + addresses.count(None)


async def counters(pods: PodClient, engine_pods: Sequence[Object]) -> dict[str, Counters]:
    """What pods that are ready have counted, by their uid; of those that do not say, nothing."""
    live = [pod for pod in engine_pods if rollout.is_ready(pod) and not rollout.is_terminating(pod)]
    live = sorted(live, key=lambda pod: str(pod["metadata"]["name"]))[:SAMPLED_PODS]
    addresses = {str(pod["metadata"]["uid"]): pod_address(pod, "http") for pod in live}
    asked = {uid: address for uid, address in addresses.items() if address is not None}
    pages = await asyncio.gather(*(pods.page(address, "/metrics") for address in asked.values()))
    found = {uid: read_counters(page) for uid, page in zip(asked, pages, strict=True)}
    return {uid: said for uid, said in found.items() if said is not None}


async def idle(pods: PodClient, observed: Observed) -> Idle:
    """For how long every pod has had no request. A pod that is not ready, or does not say, is not idle."""
    live = [pod for pod in observed.engine_pods if not rollout.is_terminating(pod) and not rollout.is_finished(pod)]
    addresses = {str(pod["metadata"]["name"]): pod_address(pod, "http") for pod in live if rollout.is_ready(pod)}
    asked = {name: address for name, address in addresses.items() if address is not None}
    if not live or len(asked) < len(live):
        return Idle(0.0, "not all of its pods are ready")
    pages = await asyncio.gather(*(pods.page(address, "/metrics") for address in asked.values()))
    said = {name: _idle(page) for name, page in zip(asked, pages, strict=True)}
    silent = next((name for name, seconds in said.items() if seconds is None), "")
    if silent:
        return Idle(0.0, f"pod {silent} does not say for how long it has had no request")
    return Idle(min(seconds for seconds in said.values() if seconds is not None))


def _idle(page: str) -> float | None:
    try:
        return idle_seconds(parse_gauges(page))
    except ValueError:
        return None


def _requests(page: str) -> int:
    try:
        gauges = parse_gauges(page)
        return int(gauges[QUEUED] + gauges[RUNNING])
    except (ValueError, KeyError):
        return 1


def _component(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))


async def _progress(
    pods: PodClient,
    service: InferenceService,
    children: Mapping[tuple[str, str], Object],
    fetch_pods: tuple[Object, ...],
) -> Progress | None:
    """Of the prefetch of what is served, or else of the commit that is to follow."""
    for wanted in (service, *([service.at(service.followed.found)] if service.followed.found else ())):
        claim = children.get(("PersistentVolumeClaim", claim_name(wanted)))
        place = "" if service.cache.has_volume else service.cache.mode
        place = str(claim["metadata"]["uid"]) if claim is not None else place
        source = source_id(wanted, place) if place else ""
        for pod in fetch_pods:
            running = pod.get("status", {}).get("phase") == "Running" and not rollout.is_terminating(pod)
            address = pod_address(pod, "progress")
            if running and address and pod["metadata"]["labels"].get(SOURCE_LABEL) == source:
                return await pods.progress(address)
    return None


async def _answer(
    pods: PodClient, service: InferenceService, answered: str, state: Rollout, engine_pods: Iterable[Object]
) -> Answer | None:
    """Ask one ready pod of the current revision, unless that is the revision known to have answered."""
    if not state.current or answered == state.current:
        return None
    for pod in engine_pods:
        fresh = rollout.template_hash(pod) == state.current and not rollout.is_terminating(pod)
        address = pod_address(pod, "http")
        if fresh and rollout.is_ready(pod) and address:
            error = await pods.complete(address, model=service.served_names[0])
            return Answer(pod["metadata"]["name"], state.current, error)
    return None
