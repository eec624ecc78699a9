"""What holds at every moment of a walk of weeks, found without asking the operator: pods, nodes and volumes tell.

Ready never lies: it is True only of the newest spec, while pods that answer serve just what it asks for. No GPU is
asked for twice: never more pods than the spec and the way of its rollout allow, none while the service sleeps or is
suspended, never two fetches of one source. Nothing is orphaned: every child has a reason in the spec.
Invariants: pure, but for what it notes in `World.said`, `Tenant.said` and `Tenant.asked`.
Knows nothing of how the operator decides and of other services: those are in neighbours.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.weeks.machines import path_of, seed_of
from tests.operator.weeks.store import is_going, service_of

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.observe.rollout import is_finished

if TYPE_CHECKING:
    from tests.operator.weeks.tenants import Tenant

# Records of revisions that are kept, those of the present one and of one that failed among them.
MOST_RECORDS = 7


@dataclass(frozen=True)
class Before:
    """What was, before the operator looked: how many pods the Deployment asked for, who answered, and where a canary
    stood: what is promoted now is on its way with the next look.
    """

    replicas: int
    answering: frozenset[str]
    canary: str


def before(tenant: Tenant) -> Before:
    live = tenant.find(kinds.DEPLOYMENT)
    replicas = int(live["spec"]["replicas"]) if live is not None else 0
    state = ((tenant.there or {}).get("status", {}).get("canary") or {}).get("state", "")
    return Before(replicas, frozenset(names(answering(tenant))), state)


def look(tenant: Tenant, earlier: Before, *, whole: bool) -> None:
    """What holds after a reconcile; `whole`: it was not cut short."""
    assert not tenant.store.idle, f"a write without cause: {tenant.store.idle}"
    service = tenant.there
    if service is None:
        return
    _asks_for_no_gpu_twice(tenant, service, earlier)
    if not whole:
        return
    ready = condition(service, "Ready")
    said = f"{tenant.name} {ready['status']} {ready['reason']}: {ready['message']}"
    if said != tenant.said:
        tenant.said = said
        tenant.world.said.append(f"{tenant.world.time:%d. %H:%M:%S} {said}")
    _tells_the_truth(tenant, service, ready, earlier)
    _leaves_nobody_alone(tenant, service, earlier)


def answering(tenant: Tenant, component: str = "engine") -> list[Object]:
    """The pods that serve."""
    return [pod for pod in pods(tenant, component) if tenant.machines.answers(pod)]


def pods(tenant: Tenant, component: str = "engine") -> list[Object]:
    """A service's pods of a component, those on their way out and those that are over apart."""
    ours = (pod for pod in tenant.store.of(kinds.POD) if service_of(pod) == tenant.name)
    found = (pod for pod in ours if not is_going(pod) and not is_finished(pod))
    return [pod for pod in found if pod["metadata"]["labels"].get("app.kubernetes.io/component") == component]


def names(found: list[Object]) -> list[str]:
    """By which pods are known."""
    return [pod["metadata"]["name"] for pod in found]


def asked(service: Object, state: str) -> Mapping[str, Any]:
    """What all pods are to be: the spec, with the canary's part in it once that is promoted, as `state` says."""
    spec, canary = service["spec"], service["spec"].get("canary")
    if canary is None or state not in ("Promoting", "Promoted"):
        return spec
    return {**spec, **{part: {**spec.get(part, {}), **canary[part]} for part in ("model", "runtime") if part in canary}}


def _tells_the_truth(tenant: Tenant, service: Object, ready: Object, earlier: Before) -> None:
    status, there = service["status"], answering(tenant)
    assert status["observedGeneration"] == service["metadata"]["generation"], "an older generation's status"
    assert status["readyReplicas"] == len(there), f"{status['readyReplicas']} ready pods, {len(there)} answer"
    servable = condition(service, "Servable")
    assert (servable["status"] == "True") == bool(there), f"Servable is {servable['status']}: {servable['message']}"
    assert all(item["reason"] and item["message"] for item in status["conditions"])
    if ready["status"] != "True":
        return
    assert there, f"Ready while no pod answers: {ready['message']}"
    wanted = asked(service, earlier.canary)
    seed = int((wanted["runtime"]["args"])[-1])
    seeds = set(map(seed_of, pods(tenant)))
    assert seeds == {seed}, f"Ready with pods of seeds {seeds}"
    served = {tenant.machines.known[path_of(pod)] for pod in pods(tenant)}
    assert {uri for uri, _ in served} == {wanted["model"]["uri"]}, f"Ready with {served}"
    assert {commit for _, commit in served} == {status["model"]["resolvedRevision"]}, f"Ready with {served}"
    scaling = wanted.get("autoscaling")
    least = max(scaling["min"], 1) if scaling else wanted.get("replicas", 1)
    assert len(there) >= least, f"Ready with {len(there)} of {least} pods"


def _asks_for_no_gpu_twice(tenant: Tenant, service: Object, earlier: Before) -> None:
    spec, live = service["spec"], tenant.find(kinds.DEPLOYMENT)
    named = {item["metadata"]["name"] for item in tenant.store.of(kinds.DEPLOYMENT) if service_of(item) == tenant.name}
    extra = named - {tenant.name, f"{tenant.name}-canary"}
    assert not extra, f"Deployments {extra}"
    if live is None or is_going(live):
        return
    strategy = live["spec"]["strategy"].get("rollingUpdate") or {"maxSurge": 0}
    replicas, there = int(live["spec"]["replicas"]), pods(tenant)
    most = _most(spec, replicas)
    # An autoscaler takes back itself what is more than its maximum by now.
    assert replicas <= max(most, earlier.replicas), f"{replicas} pods are asked for, {most} at most"
    # Fewer may be wanted by now than there were: they go, once the controller has seen it. Where a rollout went on with
    # a surge and is in place by now, those that run stay until others answer: then there may be too many, but no more
    # than at the look before, and none of them waits for a node.
    seen = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
    limit = max(most, replicas) + strategy["maxSurge"]
    asked_before, tenant.asked = tenant.asked, _sizes(tenant, live)
    assert not seen or tenant.asked <= max(limit, asked_before), f"{tenant.asked} pods asked for where {limit} may be"
    assert not seen or len(there) <= limit or not _waiting(there), f"{len(there)} pods where {limit} may be"
    canary = tenant.find(kinds.DEPLOYMENT, "-canary")
    if canary is not None and not is_going(canary):
        assert int(canary["spec"]["replicas"]) <= max(most, 1), "more pods of a canary than stable ones"
    # Of several services on one volume each has a Job: they take turns by a lock there.
    ours = (job for job in tenant.store.of(kinds.JOB) if service_of(job) == tenant.name)
    running = [job for job in ours if not job.get("status", {}).get("conditions")]
    sources = [job["metadata"]["labels"].get("stoker.dev/source") for job in running if not is_going(job)]
    known = [source for source in sources if source]
    assert len(known) == len(set(known)), f"two fetches of one source: {names(running)}"


def _most(spec: Mapping[str, Any], there: int) -> int:
    scaling = spec.get("autoscaling")
    if spec.get("suspend"):
        return there  # it falls to 0 with the next look
    if scaling is None:
        return max(int(spec.get("replicas", there)), there)
    if scaling.get("engine") == "External":
        return max(scaling["max"], int(spec.get("replicas", 0)), there)
    return max(scaling["max"], _scheduled(scaling))


def _scheduled(scaling: Mapping[str, Any]) -> int:
    hours = (scaling.get("scaleToZero") or {}).get("schedule") or ()
    return max((each.get("min", 1) for each in hours), default=0)


def _sizes(tenant: Tenant, live: Object) -> int:
    """How many pods the Deployment's ReplicaSets ask for."""
    return sum(int(each["spec"]["replicas"]) for each in tenant.store.owned_by(kinds.REPLICA_SET, live))


def _waiting(there: list[Object]) -> list[Object]:
    return [pod for pod in there if not pod["spec"].get("nodeName")]


def _leaves_nobody_alone(tenant: Tenant, service: Object, earlier: Before) -> None:
    """A service that may sleep has somebody to take a request at every moment, and falls asleep under none."""
    world, scaling, live = tenant.world, service["spec"].get("autoscaling") or {}, tenant.find(kinds.DEPLOYMENT)
    if "scaleToZero" not in scaling or service["spec"].get("suspend") or live is None or not world.holders.addresses:
        return
    found = tenant.find(kinds.ENDPOINT_SLICE, "-activator")
    held = bool(found is not None and found.get("endpoints"))
    if not int(live["spec"]["replicas"]) and earlier.replicas:
        assert held, "the pods go and nobody takes requests"
        assert not (tenant.traffic.busy and earlier.answering), "it falls asleep under requests"


def at_rest(tenant: Tenant) -> None:
    """What holds where nothing moves: every child has a reason in the spec."""
    service, name = tenant.service, tenant.name
    spec, status = service["spec"], service["status"]
    ours = [item for item in tenant.store.everything() if service_of(item) == name]
    going = [f"{item['kind']} {item['metadata']['name']}" for item in ours if is_going(item)]
    assert not going, f"on their way out for ever: {going}"
    state = (status.get("canary") or {}).get("state")
    scaling = spec.get("autoscaling") or {}
    wanted = {
        f"Deployment {name}-canary": "canary" in spec and state in ("Starting", "Running", "Passed", "Promoting"),
        f"Service {name}-canary": "canary" in spec and state in ("Starting", "Running", "Passed", "Promoting"),
        f"HorizontalPodAutoscaler {name}": bool(scaling) and scaling.get("engine", "HPA") == "HPA",
        f"EndpointSlice {name}-activator": "scaleToZero" in scaling,
        # What the pods of before had is kept until others serve.
        f"ConfigMap {name}-adapters": "adapters" in spec["model"] or condition(service, "Ready")["status"] != "True",
    }
    there = {f"{item['kind']} {item['metadata']['name']}" for item in ours}
    left = {each for each, why in wanted.items() if each in there and not why}
    assert not left, f"left behind: {left}"
    records = [item for item in ours if item["kind"] == kinds.CONTROLLER_REVISION.kind]
    assert len(records) <= MOST_RECORDS, f"{len(records)} records"
    assert len([item for item in ours if item["kind"] == kinds.REPLICA_SET.kind]) <= 14
    asleep = condition(service, "Ready")["reason"] in ("Asleep", "Suspended", "ScaledToZero")
    if asleep:
        there_still = names([*pods(tenant), *pods(tenant, "canary")])
        assert not there_still, f"{condition(service, 'Ready')['reason']} with pods {there_still}"
