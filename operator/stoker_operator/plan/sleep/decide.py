"""Plans when a service has no pods, and when it gets them back.

    Awake → FallingAsleep → Asleep → Waking → Awake

The operator alone goes from one pod to none and back; a HorizontalPodAutoscaler leaves a scale of 0 alone, and KEDA is
told to pause. From one pod on the autoscaler has the number, as it has without sleep.
Invariants: pure. Before the last pod goes, requests have another way (FallingAsleep), and while pods start both lead
somewhere (Waking), so at no moment is there nobody to take one. No pod goes that has a request or does not say so.
Where nobody would hold requests, nothing sleeps.
Knows nothing of how requests are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stoker_operator.manifests.activation import (
    ASLEEP,
    AWAKE,
    FALLING,
    WAKING,
    Bounds,
    Sleep,
    activator_slice,
    read_sleep,
    slice_addresses,
    slice_name,
)
from stoker_operator.manifests.canary import canary_runs
from stoker_operator.manifests.identity import short_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Delete, ensure
from stoker_operator.plan.pace import sooner
from stoker_operator.plan.scaling import sets_replicas, wanted_replicas
from stoker_operator.plan.sleep.stay import Stay, changes_at, heed, overrule, stamp, stay_of
from stoker_operator.plan.sleep.wish import Wish, new_wish
from stoker_operator.plan.sleep.words import activator_off, brief, sleep_condition, start_seconds, step_reason
from stoker_operator.spec.service import InferenceService
from stoker_operator.spec.sleeping import ScaleToZero

Object = Mapping[str, Any]
# What every node's rules take to follow a change of endpoints.
SETTLE_SECONDS = 5.0
# While something moves; and at least so often while a pod does not say that it is idle.
SOON_SECONDS, UNKNOWN_SECONDS = 2.0, 15.0


@dataclass(frozen=True, slots=True)
class SleepPlan:
    """What to do about sleep. `sleep` is where the service stands with this plan, None = it never sleeps.

    `no_pods`: whether the Deployment is to have none, None = sleep has no say in it. `stay`: why pods run though nobody
    asks. `again`: seconds until it matters again, None = an event will tell.
    """

    sleep: Sleep | None = None
    actions: tuple[Action, ...] = ()
    condition: Condition | None = None
    no_pods: bool | None = None
    asks_idle: bool = False
    stay: Stay | None = None
    again: float | None = None

    @property
    def state(self) -> str:
        """The state's name; "" of a service that never sleeps."""
        return self.sleep.state if self.sleep is not None else ""

    @property
    def paused(self) -> bool:
        """Whether an autoscaler is to leave the number of pods alone."""
        return self.state in (FALLING, ASLEEP)

    def held(self, observed: Observed) -> bool:
        """Whether requests that no pod takes are held."""
        return self.sleep is not None and self.sleep.holds and bool(observed.activators)


@dataclass(frozen=True, slots=True)
class _Ask:
    """What is asked of the service: by its spec, by a wish that is not carried out yet, by the hour."""

    wanted: ScaleToZero
    wish: Wish | None
    stay: Stay | None

    @property
    def sleep(self) -> Wish | None:
        """The wish that it sleeps."""
        return self.wish if self.wish is not None and not self.wish.wakes else None


def plan_sleep(service: InferenceService, observed: Observed, now: datetime) -> SleepPlan:
    """Decide on it. `now` is aware, UTC."""
    scaling = service.autoscaling
    wanted = scaling.scale_to_zero if scaling is not None else None
    live = observed.children.get(("EndpointSlice", slice_name(service)))
    if wanted is None:
        return SleepPlan(actions=tuple(_end(service, observed, live, "spec.autoscaling does not ask for it any more")))
    before = read_sleep(live)
    wish = new_wish(service, before)
    noted = heed(before, wish, wanted, now)
    stay = stay_of(noted, wanted, now) if not service.suspend else None
    if "EndpointSlice" in observed.without:
        return SleepPlan(sleep=Sleep(), condition=activator_off(), stay=stay, again=_left(noted, wanted, now))
    if service.suspend or not observed.port:
        after, steps = _to(noted, AWAKE, now, ""), SleepPlan()
    else:
        after, steps = _step(service, observed, _Ask(wanted, wish, stay), noted, now)
    address = _holder(service, observed.activators, slice_addresses(live or {}))
    actions: list[Action] = []
    if address and observed.port:
        manifest = activator_slice(service, after, _bounds(service, wanted), observed.port, address)
        why = step_reason(before, after)
        moved = after.state != before.state or after.wish != before.wish
        actions += [replace(each, reason=why) if moved else each for each in ensure(live, manifest, why)]
    said = sleep_condition(service, observed, wanted, after, stay, wish)
    again = sooner(steps.again, _left(after, wanted, now))
    return replace(
        steps, sleep=after, actions=tuple(actions), condition=said, no_pods=bool(steps.no_pods), stay=stay, again=again
    )


def _left(sleep: Sleep, wanted: ScaleToZero, now: datetime) -> float | None:
    """Seconds until the hour changes something."""
    change = changes_at(sleep, wanted, now)
    return max((change - now).total_seconds(), 1.0) if change is not None else None


def _step(
    service: InferenceService, observed: Observed, ask: _Ask, before: Sleep, now: datetime
) -> tuple[Sleep, SleepPlan]:
    """(where the service stands then, what follows for its pods and for the next look)."""
    live = observed.workload(service)
    replicas = int(live["spec"].get("replicas", 1)) if live is not None else None
    if before.state == WAKING:
        return _waking(observed, before, now)
    cause = _cause(service, before, replicas, ask.stay)
    if cause:
        return _to(before, WAKING, now, cause), SleepPlan(again=SOON_SECONDS)
    if before.state == ASLEEP:
        return before, SleepPlan(no_pods=True)
    if before.state == FALLING and replicas == 0:
        done = replace(before, wish=ask.sleep.text) if ask.sleep is not None else before
        return _to(done, ASLEEP, now, before.why), SleepPlan(no_pods=True)
    if live is not None and replicas == 0 and not sets_replicas(live) and observed.activators:
        fresh = _fresh(service, overrule(before, ask.wanted, now), now, "its Deployment was scaled to 0")
        return replace(fresh, state=ASLEEP), SleepPlan(no_pods=True)
    return _falling(service, observed, ask, before, now)


def _cause(service: InferenceService, before: Sleep, replicas: int | None, stay: Stay | None) -> str:
    """Why a service that sleeps, or is about to, is to wake; "" = nobody wants it."""
    wake = service.status.get("wake") or {}
    if before.name and wake.get("sleep") == before.name:
        return str(wake.get("by") or "a request")
    if before.state == ASLEEP and replicas:
        return f"its Deployment was scaled to {replicas}"
    if before.state == ASLEEP and service.replicas and service.replicas != before.replicas:
        return f"spec.replicas is {service.replicas}"
    if before.state in (ASLEEP, FALLING) and stay is not None:
        return stay.why
    return ""


def _waking(observed: Observed, before: Sleep, now: datetime) -> tuple[Sleep, SleepPlan]:
    """Until a pod has been ready for long enough that every node knows its way to it."""
    if not observed.rollout.ready:
        return replace(before, ready_at=""), SleepPlan(again=SOON_SECONDS)
    since = before.ready_at or stamp(now)
    left = SETTLE_SECONDS - (now - datetime.fromisoformat(since)).total_seconds()
    if left <= 0:
        return _to(before, AWAKE, now, before.why), SleepPlan()
    return replace(before, ready_at=since), SleepPlan(again=left)


def _falling(
    service: InferenceService, observed: Observed, ask: _Ask, before: Sleep, now: datetime
) -> tuple[Sleep, SleepPlan]:
    """From awake to the moment at which the pods go, and back if a request comes meanwhile."""
    awake = _to(before, AWAKE, now, "a request came" if before.state == FALLING else before.why)
    if ask.stay is not None or not observed.activators or not _settled(service, observed) or canary_runs(service):
        return awake, SleepPlan()
    if observed.idle is None:
        return before, SleepPlan(asks_idle=True)
    limit = 0 if service.replicas == 0 or ask.sleep is not None else ask.wanted.idle_after
    # A pod with a request is idle for 0 s, which is no moment to go, however little is asked for.
    left = limit - observed.idle.seconds if observed.idle.seconds else max(limit, 1.0)
    if observed.idle.why or left > 0:
        return awake, SleepPlan(again=UNKNOWN_SECONDS if observed.idle.why else max(left, 1.0))
    if before.state != FALLING:
        return _fresh(service, before, now, _why_it_falls(ask, limit)), SleepPlan(again=SETTLE_SECONDS)
    settles = SETTLE_SECONDS - (now - datetime.fromisoformat(before.since)).total_seconds()
    return before, SleepPlan(no_pods=settles <= 0, again=settles if settles > 0 else SOON_SECONDS)


def _why_it_falls(ask: _Ask, limit: int) -> str:
    if ask.sleep is not None:
        return f"it was wished: {ask.sleep.text}"
    return f"no pod had a request for {brief(ask.wanted.idle_after)}" if limit else "spec.replicas is 0"


def _settled(service: InferenceService, observed: Observed) -> bool:
    """Whether this generation was said to serve, and does: what is on its way is not put to sleep."""
    ready = next((item for item in service.status.get("conditions") or () if item["type"] == "Ready"), None)
    if ready is None or ready["status"] != "True" or ready.get("observedGeneration") != service.generation:
        return False
    state = observed.rollout
    return state.settled and 0 < state.ready == state.total and not observed.silent


def _fresh(service: InferenceService, before: Sleep, now: datetime, why: str) -> Sleep:
    """A sleep that begins."""
    name = now.isoformat(timespec="milliseconds")
    begun = replace(before, state=FALLING, name=name, since=stamp(now), why=why)
    return replace(begun, ready_at="", replicas=service.replicas)


def _to(before: Sleep, state: str, now: datetime, why: str) -> Sleep:
    """The same sleep in another state; awake, it has ended."""
    if before.state == state:
        return before
    moved = replace(before, state=state, since=stamp(now), why=why)
    return replace(moved, name="", ready_at="", replicas=None) if state == AWAKE else moved


def _holder(service: InferenceService, activators: Sequence[str], there: Sequence[str]) -> str:
    """Which of the activator's pods holds this service's requests, "" = none: one, so that its bounds and its order are
    those of the service; the one that has them keeps them while it can.
    """
    if there and (not activators or there[0] in activators):
        return there[0]
    return min(activators, key=lambda address: short_hash([service.namespace, service.name, address]), default="")


def _end(service: InferenceService, observed: Observed, live: Object | None, why: str) -> list[Action]:
    """Take the activator off for good, once a pod is there to take requests, or where none is to come: what it held
    then, nobody would answer.
    """
    if live is None or "deletionTimestamp" in live["metadata"]:
        return []
    wanted = wanted_replicas(service, observed.workload(service))
    coming = observed.rollout.desired if wanted is None else wanted
    if read_sleep(live).holds and coming and not observed.rollout.ready:
        return []
    return [Delete("EndpointSlice", live["metadata"]["name"], live["metadata"]["uid"], why)]


def _bounds(service: InferenceService, wanted: ScaleToZero) -> Bounds:
    return Bounds(
        max_queued=wanted.max_queued,
        max_wait=wanted.max_wait,
        start=start_seconds(service),
        keys=service.endpoint.api_keys is not None,
        models=service.served_names,
    )
