"""What holds between services that share nodes, found without asking the operator: nodes and pods tell.

A change goes beside the pods that serve where a GPU is free that nobody else holds or is about to get, and nowhere
else; where it finds its GPU taken it goes in place. A canary has no pod more than it is to have. What is looked at is
touched, and nothing of another service; no pod goes by the name of a service that does not own it.
Invariants: pure, but that the touched are forgotten before each look.
Knows nothing of how the operator decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.weeks.checks import answering, pods
from tests.operator.weeks.machines import GPU, gpus_of
from tests.operator.weeks.store import Store, is_going, service_of

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.manifests.identity import short_hash
from stoker_operator.observe.rollout import TEMPLATE_HASH, is_finished

if TYPE_CHECKING:
    from tests.operator.weeks.tenants import Tenant


@dataclass(frozen=True)
class Around:
    """What was, before the operator looked: the Deployment's template, "" = there was none; whether a pod served, and
    whether one of the newest revision waited beside it for what pods of the same service hold.
    """

    template: str
    serves: bool
    waits: bool


def before(tenant: Tenant) -> Around:
    tenant.store.touched.clear()
    live = tenant.find(kinds.DEPLOYMENT)
    return Around(_template(live), bool(answering(tenant)), live is not None and _waits_beside(tenant, live))


def look(tenant: Tenant, earlier: Around, *, whole: bool) -> None:
    """What holds after a reconcile of this service; `whole`: it was not cut short."""
    touched = tenant.store.touched - {tenant.name, ""}
    assert not touched, f"a look at {tenant.name} wrote what is of {touched}"
    for pod in tenant.store.of(kinds.POD):
        owner = pod["metadata"]["ownerReferences"][0]["name"]
        assert owner.startswith(f"{service_of(pod)}-"), f"a pod of {owner} goes by the name of {service_of(pod)}"
    service, live, canary = tenant.there, tenant.find(kinds.DEPLOYMENT), tenant.find(kinds.DEPLOYMENT, "-canary")
    if service is None or live is None or is_going(live):
        return
    if canary is not None and not is_going(canary) and _is_seen(canary):
        there, most = len(pods(tenant, "canary")), int(canary["spec"]["replicas"])
        assert there <= most, f"{there} pods of the canary of {tenant.name}, which is to have {most}"
    if (service["spec"].get("rollout") or {}).get("strategy", "Auto") == "Auto":
        _goes_where_there_is_room(tenant, service, live, earlier, whole=whole)


def _goes_where_there_is_room(tenant: Tenant, service: Object, live: Object, earlier: Around, *, whole: bool) -> None:
    surges = bool((live["spec"]["strategy"].get("rollingUpdate") or {}).get("maxSurge"))
    gpus, begun = int(service["spec"]["resources"]["gpus"]), _template(live) != earlier.template
    if not int(live["spec"]["replicas"]) or not earlier.template:
        return
    if begun and earlier.serves:
        spare, freed = _is_free(tenant, gpus), _is_left(tenant, gpus)
        assert spare or not (surges and freed), f"{tenant.name} surges, and no GPU is free: {_held(tenant.store)}"
        assert surges or not spare, f"{tenant.name} goes in place beside GPUs that are free: {_held(tenant.store)}"
    waits = whole and not begun and earlier.waits and condition(service, "Ready")["reason"] == "Unschedulable"
    assert not (waits and surges and _is_left(tenant, gpus)), f"{tenant.name} waits for a GPU that it has itself"


def _is_free(tenant: Tenant, gpus: int) -> bool:
    """Whether a node has so many GPUs for another pod, once those have theirs who wait for them and fit as things
    are.
    """
    free = _free(tenant.store)
    own = {pod["metadata"]["uid"] for pod in pods(tenant)}
    for pod in tenant.store.of(kinds.POD):
        if not pod["spec"].get("nodeName") and not is_finished(pod) and pod["metadata"]["uid"] not in own:
            name = next((name for name, count in free.items() if gpus_of(pod) and count >= gpus_of(pod)), "")
            free[name] = free.get(name, 0) - gpus_of(pod)
    return any(count >= gpus for name, count in free.items() if name)


def _is_left(tenant: Tenant, gpus: int) -> bool:
    """Whether a node would have so many GPUs, were a pod of this service gone."""
    free = _free(tenant.store)
    own = [pod for pod in pods(tenant) if pod["spec"].get("nodeName") in free]
    return any(free[pod["spec"]["nodeName"]] + gpus_of(pod) >= gpus for pod in own)


def _free(store: Store) -> dict[str, int]:
    """How many GPUs nobody holds, of each node that takes pods; who is on his way out holds his."""
    found = {node["metadata"]["name"]: int(node["status"]["allocatable"][GPU]) for node in store.of(kinds.NODE)
             if not node["spec"].get("unschedulable") and not node["spec"].get("taints")}  # fmt: skip
    for pod in store.of(kinds.POD):
        name = pod["spec"].get("nodeName")
        if name in found and not is_finished(pod):
            found[name] -= gpus_of(pod)
    return found


def _held(store: Store) -> dict[str, Any]:
    """Who holds or waits for GPUs, for a message."""
    asking = [pod for pod in store.of(kinds.POD) if gpus_of(pod) and not is_finished(pod)]
    there = {pod["metadata"]["name"]: (pod["spec"].get("nodeName") or "waits", gpus_of(pod)) for pod in asking}
    return {"free": _free(store), **there}


def _waits_beside(tenant: Tenant, live: Object) -> bool:
    """Whether a pod of the newest revision finds no GPU while those of before are there, none of them on its way."""
    current, there = short_hash(live["spec"]["template"]), pods(tenant)
    going = [pod for pod in tenant.store.of(kinds.POD) if service_of(pod) == tenant.name and is_going(pod)]
    old = [pod for pod in there if pod["metadata"]["labels"].get(TEMPLATE_HASH) != current]
    new = [pod for pod in there if pod not in old]
    said = [each.get("message", "") for pod in new for each in pod["status"].get("conditions") or ()]
    return bool(old) and not going and _is_seen(live) and any(f"Insufficient {GPU}" in text for text in said)


def _is_seen(item: Object) -> bool:
    return bool(item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"])


def _template(live: Object | None) -> str:
    return short_hash(live["spec"]["template"]) if live is not None else ""
