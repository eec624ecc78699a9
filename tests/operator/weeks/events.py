"""What may befall a service within weeks: its owner, its clients, its source, its pods, its nodes, its operator.

Invariants: an event is named by its function; `n` chooses among its variants. None of them writes what is the
operator's alone.
Knows nothing of what the operator does about it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.operator.weeks.checks import pods
from tests.operator.weeks.store import service_of
from tests.operator.weeks.tenants import Tenant

from stoker_operator.cluster import kinds
from stoker_operator.observe.rollout import is_ready
from stoker_operator.spec.service import CANARY_WISH, WISH

Act = Callable[[Tenant, int], None]
EVENTS: dict[str, Act] = {}
OFFICE = {"start": "0 8 * * 1-5", "end": "0 18 * * 1-5", "timezone": "Europe/Berlin", "min": 2}
NIGHT = {"start": "30 1 * * *", "end": "30 3 * * *", "timezone": "Europe/Berlin"}


def event(act: Act) -> Act:
    """Enter an event."""
    EVENTS[act.__name__] = act
    return act


# The owner.


@event
def another_revision(tenant: Tenant, n: int) -> None:
    """Of seed 7, engines crash."""
    tenant.change(runtime={"args": ["--seed", str(n + 1)]})


@event
def all_get_another_revision(tenant: Tenant, n: int) -> None:
    """At one moment, as by a sync of a repository."""
    for each in tenant.world.tenants.values():
        each.change(runtime={"args": ["--seed", str(n + 2)]})


@event
def a_wrong_image(tenant: Tenant, n: int) -> None:
    tenant.change(runtime={"image": f"nowhere/none:{n}" if n % 2 else None})


@event
def another_model(tenant: Tenant, n: int) -> None:
    tenant.change(model={"uri": f"hf://org/model-{n % 3}"})


@event
def follow(tenant: Tenant, n: int) -> None:
    tenant.change(model={"updatePolicy": "Follow" if n % 3 else "Pinned"})


@event
def adapters(tenant: Tenant, n: int) -> None:
    asked = [{"name": f"a{each}", "uri": f"hf://org/lora-{each}", "revision": f"v{n % 4}"} for each in range(n % 3)]
    tenant.change(model={"adapters": asked if n % 4 else None})


@event
def an_autoscaler(tenant: Tenant, n: int) -> None:
    sleeps = {"idleAfter": "15m", "schedule": ([], [OFFICE], [NIGHT], [OFFICE, NIGHT])[n // 3 % 4]}
    least: dict[str, Any] = {"min": 0, "scaleToZero": sleeps} if n % 3 else {"min": 1, "scaleToZero": None}
    tenant.change(replicas=None, autoscaling={"engine": "HPA", "max": 2 + n % 2, **least})


@event
def no_autoscaler(tenant: Tenant, n: int) -> None:
    tenant.change(replicas=n % 3, autoscaling=None)


@event
def another_scaler(tenant: Tenant, n: int) -> None:
    """Whoever writes the scale."""
    sleeps = {"idleAfter": "5m", "schedule": None}
    least: dict[str, Any] = {"min": 0, "scaleToZero": sleeps} if n % 2 else {"min": 1, "scaleToZero": None}
    tenant.change(autoscaling={"engine": "External", "max": 3, **least}, replicas=n % 4)


@event
def somebody_scales(tenant: Tenant, n: int) -> None:
    """As kubectl scale does to the Deployment."""
    live, scaling = tenant.find(kinds.DEPLOYMENT), tenant.service["spec"].get("autoscaling")
    if live is not None and scaling is not None and tenant.service["spec"].get("replicas") is None:
        tenant.store.patch_spec(live, {"replicas": n % (scaling["max"] + 1)})


@event
def suspend(tenant: Tenant, n: int) -> None:
    tenant.change(suspend=n % 2 == 0)


@event
def a_rollout_policy(tenant: Tenant, n: int) -> None:
    policies = ({"paused": True}, {"paused": False}, {"autoRollback": False}, {"autoRollback": True},
                {"strategy": "Recreate"}, {"strategy": "Auto"}, {"waitForIdle": "20m"}, {"waitForIdle": "0s"},
                {"progressDeadline": "10m"})  # fmt: skip
    tenant.change(rollout=policies[n % len(policies)])


@event
def a_wish(tenant: Tenant, n: int) -> None:
    tenant.wishes += 1
    tenant.note(WISH, f"{('wake', 'wake for 3h', 'sleep')[n % 3]} at {tenant.wishes}")


# A canary.


@event
def a_canary(tenant: Tenant, n: int) -> None:
    """Of another seed, or of another model; by steps or by a weight; a third of them is bad or slow."""
    parts: dict[str, Any] = {"runtime": {"args": ["--seed", str(n + 2)]}}
    if n % 4 == 3:
        parts = {"model": {"uri": f"hf://org/model-{(n + 1) % 3}"}}
    share: dict[str, Any] = {"weight": 10 + n} if n % 3 == 0 else {"steps": [10, 40]}
    tenant.change(canary=None)
    if "adapters" not in tenant.service["spec"]["model"] or "runtime" in parts:
        tenant.change(canary={**parts, **share, "window": "60s", "requests": 10})


@event
def no_canary(tenant: Tenant, n: int) -> None:
    tenant.change(canary=None)


@event
def a_canary_wish(tenant: Tenant, n: int) -> None:
    name = (tenant.service.get("status", {}).get("canary") or {}).get("name", "none")
    tenant.note(CANARY_WISH, f"{('promote', 'abort')[n % 2]} {name}")


@event
def the_canary_is_moved_into_the_spec(tenant: Tenant, n: int) -> None:
    """As `kubectl stoker promote --spec` does, with the canary taken out or left for later."""
    canary = tenant.service["spec"].get("canary")
    if canary is not None:
        parts = {part: canary[part] for part in ("model", "runtime") if part in canary}
        tenant.change(**parts, **({} if n % 2 else {"canary": None}))


# Clients.


@event
def traffic(tenant: Tenant, n: int) -> None:
    """It begins with a request that wakes who sleeps, or it ends."""
    tenant.traffic.turn(n % 3 != 0)
    tenant.world.controllers.loads[tenant.name] = 1 + n % 4 if n % 3 else 1
    sleep = tenant.service.get("status", {}).get("sleep") or {}
    slices = tenant.find(kinds.ENDPOINT_SLICE, "-activator")
    if tenant.traffic.busy and slices is not None and slices.get("endpoints") and sleep:
        name = _sleeps_name(slices)
        tenant.store.say(tenant.service, wake={"sleep": name, "by": "a request"})


def _sleeps_name(found: Any) -> str:
    from stoker_operator.manifests.activation import read_sleep

    return read_sleep(found).name


# The source.


@event
def a_new_commit(tenant: Tenant, n: int) -> None:
    uri = f"hf://org/model-{n % 3}"
    tenant.machines.heads[uri] = tenant.machines.heads.get(uri, 0) + 1


@event
def fetches_fail(tenant: Tenant, n: int) -> None:
    tenant.machines.fetch_fails = ("", "HubUnreachable", "TokenRejected")[n % 3]


# Pods and nodes.


@event
def a_pod_is_deleted(tenant: Tenant, n: int) -> None:
    for pod in pods(tenant, ("engine", "canary")[n // 2 % 2])[n % 2 :][:1]:
        tenant.store.remove(pod)


@event
def an_engine_crashes(tenant: Tenant, n: int) -> None:
    for pod in pods(tenant, ("engine", "canary")[n // 2 % 2])[n % 2 :][:1]:
        if is_ready(pod):
            tenant.machines.struck[pod["metadata"]["uid"]] = tenant.world.time


@event
def a_pod_is_evicted(tenant: Tenant, n: int) -> None:
    for pod in pods(tenant)[n % 2 :][:1]:
        if pod["spec"].get("nodeName"):
            tenant.machines.fail(pod, "Evicted", "The node was low on memory.")


@event
def a_node_is_drained(tenant: Tenant, n: int) -> None:
    """Cordoned, and its pods are evicted one at a time, as the disruption budget lets them."""
    name = sorted(tenant.machines.nodes)[n % len(tenant.machines.nodes)]
    tenant.machines.cordon(name)
    for pod in tenant.machines.on(name):
        there = pods(tenant.world.tenants[service_of(pod)])
        if sum(map(tenant.machines.answers, there)) >= len(there):
            tenant.store.remove(pod)


@event
def a_node_hangs(tenant: Tenant, n: int) -> None:
    tenant.machines.hang(sorted(tenant.machines.nodes)[n % len(tenant.machines.nodes)])


@event
def nodes_come_back(tenant: Tenant, n: int) -> None:
    for name in sorted(tenant.machines.nodes):
        tenant.machines.come_back(name)


@event
def a_node_joins(tenant: Tenant, n: int) -> None:
    if len(tenant.machines.nodes) < 4:
        tenant.machines.add(f"new-{tenant.store.version}", 1 + n % 2)


@event
def a_node_leaves(tenant: Tenant, n: int) -> None:
    if len(tenant.machines.nodes) > 1:
        tenant.machines.leave(sorted(tenant.machines.nodes)[n % len(tenant.machines.nodes)])


@event
def a_gpu_breaks(tenant: Tenant, n: int) -> None:
    tenant.machines.break_gpu(sorted(tenant.machines.nodes)[n % len(tenant.machines.nodes)])


# The operator.


@event
def another_leads(tenant: Tenant, n: int) -> None:
    """Its clock may be ahead or behind."""
    tenant.world.skew = timedelta(seconds=(0, 30, -30, 2)[n % 4])
    tenant.world.take_over()


@event
def the_operator_is_killed(tenant: Tenant, n: int) -> None:
    """Before its write number n from now on."""
    tenant.store.dies_before = n


@event
def the_api_server_refuses(tenant: Tenant, n: int) -> None:
    tenant.store.refuses = 1 + n % 5


@event
def nobody_holds_requests(tenant: Tenant, n: int) -> None:
    """The activator's pods are others, or none."""
    tenant.world.holders.addresses = (("10.99.0.8",), (), ("10.99.0.7",))[n % 3]
