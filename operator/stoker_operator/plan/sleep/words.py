"""What is said of a service that sleeps or wakes: its condition, the reason of Ready, the step that a start has reached
and how long it still takes.

Invariants: pure; a start is expected to take as long as the one that was measured.
Knows nothing of what puts a service to sleep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stoker_operator.manifests.activation import ASLEEP, AWAKE, FALLING, WAKING, Sleep
from stoker_operator.observe.rollout import is_pending
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Condition, Finding
from stoker_operator.plan.pods import pods_that_count
from stoker_operator.plan.sleep.hours import next_start, span_at
from stoker_operator.plan.sleep.stay import Stay, stamp
from stoker_operator.plan.sleep.wish import Wish, wish_problem
from stoker_operator.spec.service import InferenceService
from stoker_operator.spec.sleeping import ScaleToZero

Object = Mapping[str, Any]
# Of an engine that was never measured.
START_SECONDS = 60
_SAID = {FALLING: "The pods go now", ASLEEP: "No pods run", WAKING: "Pods start"}
# What a pod that is as it should be may say while a service wakes, and while it falls asleep.
_ON_ITS_WAY = ("PodsStarting", "RollingOut", "AwaitingAnswer", "PodsStopping", "ScaledToZero")


def start_seconds(service: InferenceService) -> int:
    """How long a pod takes from being made to being ready: as long as the one that was measured."""
    measured = service.status.get("startup") or {}
    phases = [measured.get(f"{phase}Seconds") for phase in ("schedule", "verify", "load")]
    if not isinstance(phases[2], int):
        return START_SECONDS
    return sum(phase for phase in phases if isinstance(phase, int)) + 1


def sleep_finding(
    service: InferenceService, observed: Observed, sleep: Sleep | None, blocking: Finding | None, now: datetime
) -> Finding | None:
    """Why the service is not ready, given the reason that its pods give; theirs stays where they have trouble."""
    if sleep is None or blocking is None or blocking.reason not in _ON_ITS_WAY:
        return blocking
    if sleep.state == ASLEEP or (sleep.state == FALLING and not observed.rollout.desired):
        how = f"kubectl stoker wake {service.name}"
        text = (
            f"No pods run since {sleep.since}: {sleep.why}. A request starts one, and is held meanwhile; so does: {how}"
        )
        start = wakes_at(service, sleep, now)
        return Finding("Asleep", f"{text}. Its schedule does at {stamp(start)}" if start is not None else text)
    if sleep.state == WAKING:
        step, left = waking_step(observed), eta_seconds(service, sleep, now)
        soon = f"about {left} s to go" if left else "it takes longer than the last time"
        return Finding("Waking", f"It wakes since {sleep.since}: {sleep.why}. Now: {step}; {soon}.")
    return blocking


def wakes_at(service: InferenceService, sleep: Sleep, now: datetime) -> datetime | None:
    """When the schedule has pods run next; None without one."""
    scaling = service.autoscaling
    if scaling is None or scaling.scale_to_zero is None:
        return None
    # Within a span that is slept through, the next one counts.
    since = datetime.fromisoformat(sleep.skips) if sleep.skips else now
    schedule = scaling.scale_to_zero.schedule
    return since if sleep.skips and span_at(schedule, since) else next_start(schedule, since)


def eta_seconds(service: InferenceService, sleep: Sleep, now: datetime) -> int:
    """Seconds until a pod that starts is ready; 0 where that should be over."""
    passed = (now - datetime.fromisoformat(sleep.since)).total_seconds()
    return max(0, round(start_seconds(service) - passed))


def waking_step(observed: Observed) -> str:
    """What the pod that is furthest on its way does."""
    steps = [_step(pod) for pod in pods_that_count(observed)]
    return max(steps)[1] if steps else "its pod is being made"


def _step(pod: Object) -> tuple[int, str]:
    """(how far, in words)."""
    status = pod.get("status", {})
    conditions = {item["type"]: item["status"] for item in status.get("conditions") or ()}
    if conditions.get("Ready") == "True":
        return 4, "a pod is ready"
    if conditions.get("PodScheduled") != "True" and is_pending(pod):
        return 0, "a pod waits for a node"
    if _runs(status.get("containerStatuses"), "engine"):
        return 3, "the engine loads the model"
    if _runs(status.get("initContainerStatuses"), "verify"):
        return 2, "the weights are checked"
    return 1, "a node makes the pod's containers"


def _runs(statuses: Sequence[Object] | None, name: str) -> bool:
    return any(item["name"] == name and (item.get("state") or {}).get("running") for item in statuses or ())


def step_reason(before: Sleep, after: Sleep) -> str:
    """Why the activator's addresses are written."""
    if after.state == before.state and after.wish != before.wish:
        return f"it was wished: {after.wish}"
    if after.state == before.state:
        return "the activator holds requests while no pod runs"
    return {
        AWAKE: "pods take requests",
        FALLING: f"{after.why}; the activator takes requests before the pods go",
        ASLEEP: "no pods run",
        WAKING: f"it wakes: {after.why}",
    }[after.state]


def sleep_condition(
    service: InferenceService,
    observed: Observed,
    wanted: ScaleToZero,
    after: Sleep,
    stay: Stay | None,
    wish: Wish | None,
) -> Condition:
    """Whether the service may sleep, and where it stands. `wish` is one that was not carried out before this."""
    if service.suspend:
        return _sleeps("False", "Suspended", "spec.suspend is true.")
    if not observed.activators:
        text = "No pod of the activator is ready, so nobody would hold requests, and nothing falls asleep"
        return _sleeps("False", "NoActivator", f"{text}. See the chart's Deployment of the activator.")
    if not observed.port:
        return _sleeps("False", "NoPort", "Every port of the activator is another service's.")
    problem = wish_problem(service)
    if problem:
        return _sleeps("Unknown", "WishUnknown", f"{problem}.")
    if after.state != AWAKE:
        status, reason = "True", after.state
        return _sleeps(status, reason, f"{_SAID[after.state]}: {after.why}.")
    if stay is not None:
        return _sleeps("True", "Awake", f"Pods run until {stamp(stay.until)} at least: {stay.why}.")
    if observed.idle is not None and observed.idle.why:
        return _sleeps("Unknown", "IdleUnknown", f"It stays awake: {observed.idle.why}.")
    if wish is not None and not wish.wakes:
        return _sleeps("True", "Awake", f"Pods run until none of them has a request: it was wished: {wish.text}.")
    return _sleeps("True", "Awake", f"Pods run until all of them have had no request for {brief(wanted.idle_after)}.")


def activator_off() -> Condition:
    """What is said where the chart brought no activator."""
    text = "The chart's activator.enabled is off, so nobody would hold requests: pods run all the time."
    return _sleeps("False", "ActivatorOff", text)


def _sleeps(status: str, reason: str, message: str) -> Condition:
    return Condition("ScaleToZero", status, reason, message)


def brief(seconds: int) -> str:
    """A duration as a spec says it."""
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
