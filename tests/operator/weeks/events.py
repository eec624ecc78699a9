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
from tests.operator.weeks.world import World

from stoker_operator.cluster import kinds
from stoker_operator.observe.rollout import is_ready
from stoker_operator.spec.service import CANARY_WISH, WISH

Act = Callable[[World, int], None]
EVENTS: dict[str, Act] = {}
OFFICE = {"start": "0 8 * * 1-5", "end": "0 18 * * 1-5", "timezone": "Europe/Berlin", "min": 2}
NIGHT = {"start": "30 1 * * *", "end": "30 3 * * *", "timezone": "Europe/Berlin"}


def event(act: Act) -> Act:
    """Enter an event."""
    EVENTS[act.__name__] = act
    return act


# The owner.


@event
def another_revision(world: World, n: int) -> None:
    """Of seed 7, engines crash."""
    world.change(runtime={"args": ["--seed", str(n + 1)]})


@event
def a_wrong_image(world: World, n: int) -> None:
    world.change(runtime={"image": f"nowhere/none:{n}" if n % 2 else None})


@event
def another_model(world: World, n: int) -> None:
    world.change(model={"uri": f"hf://org/model-{n % 3}"})


@event
def follow(world: World, n: int) -> None:
    world.change(model={"updatePolicy": "Follow" if n % 3 else "Pinned"})


@event
def adapters(world: World, n: int) -> None:
    asked = [{"name": f"a{each}", "uri": f"hf://org/lora-{each}", "revision": f"v{n % 4}"} for each in range(n % 3)]
    world.change(model={"adapters": asked if n % 4 else None})


@event
def an_autoscaler(world: World, n: int) -> None:
    sleeps = {"idleAfter": "15m", "schedule": ([], [OFFICE], [NIGHT], [OFFICE, NIGHT])[n // 3 % 4]}
    least: dict[str, Any] = {"min": 0, "scaleToZero": sleeps} if n % 3 else {"min": 1, "scaleToZero": None}
    world.change(replicas=None, autoscaling={"engine": "HPA", "max": 2 + n % 2, **least})


@event
def no_autoscaler(world: World, n: int) -> None:
    world.change(replicas=n % 3, autoscaling=None)


@event
def another_scaler(world: World, n: int) -> None:
    """Whoever writes the scale."""
    sleeps = {"idleAfter": "5m", "schedule": None}
    least: dict[str, Any] = {"min": 0, "scaleToZero": sleeps} if n % 2 else {"min": 1, "scaleToZero": None}
    world.change(autoscaling={"engine": "External", "max": 3, **least}, replicas=n % 4)


@event
def somebody_scales(world: World, n: int) -> None:
    """As kubectl scale does to the Deployment."""
    live, scaling = world.store.find(kinds.DEPLOYMENT, "demo"), world.service["spec"].get("autoscaling")
    if live is not None and scaling is not None and world.service["spec"].get("replicas") is None:
        world.store.patch_spec(live, {"replicas": n % (scaling["max"] + 1)})


@event
def suspend(world: World, n: int) -> None:
    world.change(suspend=n % 2 == 0)


@event
def a_rollout_policy(world: World, n: int) -> None:
    policies = ({"paused": True}, {"paused": False}, {"autoRollback": False}, {"autoRollback": True},
                {"strategy": "Recreate"}, {"strategy": "Auto"}, {"waitForIdle": "20m"}, {"waitForIdle": "0s"},
                {"progressDeadline": "10m"})  # fmt: skip
    world.change(rollout=policies[n % len(policies)])


@event
def a_wish(world: World, n: int) -> None:
    world.wishes += 1
    world.note(WISH, f"{('wake', 'wake for 3h', 'sleep')[n % 3]} at {world.wishes}")


# A canary.


@event
def a_canary(world: World, n: int) -> None:
    """Of another seed, or of another model; by steps or by a weight; a third of them is bad or slow."""
    parts: dict[str, Any] = {"runtime": {"args": ["--seed", str(n + 2)]}}
    if n % 4 == 3:
        parts = {"model": {"uri": f"hf://org/model-{(n + 1) % 3}"}}
    share: dict[str, Any] = {"weight": 10 + n} if n % 3 == 0 else {"steps": [10, 40]}
    world.change(canary=None)
    if "adapters" not in world.service["spec"]["model"] or "runtime" in parts:
        world.change(canary={**parts, **share, "window": "60s", "requests": 10})


@event
def no_canary(world: World, n: int) -> None:
    world.change(canary=None)


@event
def a_canary_wish(world: World, n: int) -> None:
    name = (world.service.get("status", {}).get("canary") or {}).get("name", "none")
    world.note(CANARY_WISH, f"{('promote', 'abort')[n % 2]} {name}")


@event
def the_canary_is_moved_into_the_spec(world: World, n: int) -> None:
    """As `kubectl stoker promote --spec` does, with the canary taken out or left for later."""
    canary = world.service["spec"].get("canary")
    if canary is not None:
        parts = {part: canary[part] for part in ("model", "runtime") if part in canary}
        world.change(**parts, **({} if n % 2 else {"canary": None}))


# Clients.


@event
def traffic(world: World, n: int) -> None:
    """It begins with a request that wakes who sleeps, or it ends."""
    world.traffic.turn(n % 3 != 0)
    world.controllers.load = 1 + n % 4 if n % 3 else 1
    sleep = world.service.get("status", {}).get("sleep") or {}
    slices = world.store.find(kinds.ENDPOINT_SLICE, "demo-activator")
    if world.traffic.busy and slices is not None and slices.get("endpoints") and sleep:
        name = _sleeps_name(slices)
        world.store.say(world.service, wake={"sleep": name, "by": "a request"})


def _sleeps_name(found: Any) -> str:
    from stoker_operator.manifests.activation import read_sleep

    return read_sleep(found).name


# The source.


@event
def a_new_commit(world: World, n: int) -> None:
    uri = f"hf://org/model-{n % 3}"
    world.machines.heads[uri] = world.machines.heads.get(uri, 0) + 1


@event
def fetches_fail(world: World, n: int) -> None:
    world.machines.fetch_fails = ("", "HubUnreachable", "TokenRejected")[n % 3]


# Pods and nodes.


@event
def a_pod_is_deleted(world: World, n: int) -> None:
    for pod in pods(world, ("engine", "canary")[n // 2 % 2])[n % 2 :][:1]:
        world.store.remove(pod)


@event
def an_engine_crashes(world: World, n: int) -> None:
    for pod in pods(world, ("engine", "canary")[n // 2 % 2])[n % 2 :][:1]:
        if is_ready(pod):
            world.machines.struck[pod["metadata"]["uid"]] = world.time


@event
def a_pod_is_evicted(world: World, n: int) -> None:
    for pod in pods(world)[n % 2 :][:1]:
        if pod["spec"].get("nodeName"):
            world.machines.fail(pod, "Evicted", "The node was low on memory.")


@event
def a_node_is_drained(world: World, n: int) -> None:
    """Cordoned, and its pods are evicted one at a time, as the disruption budget lets them."""
    name = sorted(world.machines.nodes)[n % len(world.machines.nodes)]
    world.machines.cordon(name)
    for pod in world.machines.on(name):
        if sum(map(world.machines.answers, pods(world))) >= len(pods(world)):
            world.store.remove(pod)


@event
def a_node_hangs(world: World, n: int) -> None:
    world.machines.hang(sorted(world.machines.nodes)[n % len(world.machines.nodes)])


@event
def nodes_come_back(world: World, n: int) -> None:
    for name in sorted(world.machines.nodes):
        world.machines.come_back(name)


@event
def a_node_joins(world: World, n: int) -> None:
    if len(world.machines.nodes) < 4:
        world.machines.add(f"new-{world.store.version}", 1 + n % 2)


@event
def a_node_leaves(world: World, n: int) -> None:
    if len(world.machines.nodes) > 1:
        world.machines.leave(sorted(world.machines.nodes)[n % len(world.machines.nodes)])


@event
def a_gpu_breaks(world: World, n: int) -> None:
    world.machines.break_gpu(sorted(world.machines.nodes)[n % len(world.machines.nodes)])


# The operator.


@event
def another_leads(world: World, n: int) -> None:
    """Its clock may be ahead or behind."""
    world.skew = timedelta(seconds=(0, 30, -30, 2)[n % 4])
    world.take_over()


@event
def the_operator_is_killed(world: World, n: int) -> None:
    """Before its write number n from now on."""
    world.store.dies_before = n


@event
def the_api_server_refuses(world: World, n: int) -> None:
    world.store.refuses = 1 + n % 5


@event
def nobody_holds_requests(world: World, n: int) -> None:
    """The activator's pods are others, or none."""
    world.holders.addresses = (("10.99.0.8",), (), ("10.99.0.7",))[n % 3]
