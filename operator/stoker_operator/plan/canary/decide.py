"""Plans a canary: its pods beside the stable ones, its share, the steps, and what becomes of it.

    Starting → Running (step after step) → Promoting → Promoted
                  ↘ Passed (a weight) ↗        ↘ Returning → Aborted
    Starting, Running, Passed → Failed, Aborted

The spec is its owner's and is never written. A canary that is promoted is served in the place of spec.model or
spec.runtime for as long as spec.canary asks for it (`as_served`); once the owner has moved it there, the pods are the
same ones.
Invariants: pure. Nothing here writes, or waits for, a stable pod: those are rolled out by plan/rollout.py, which knows
of no canary. A canary that was given up stays so while the spec asks for the same.
Knows nothing of how figures come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.canary import (
    ABORTED,
    ADOPTED,
    FAILED,
    IN_SPEC,
    MOVING,
    PASSED,
    PROMOTED,
    PROMOTING,
    RETURNING,
    RUNNING,
    STARTING,
    known_canary,
)
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Delete, ensure
from stoker_operator.plan.cache import CachePlan, plan_cache
from stoker_operator.plan.canary import words
from stoker_operator.plan.canary.judge import BAD, EARLY, FEW, judge
from stoker_operator.plan.canary.report import (
    counts,
    judged_by,
    last_figures,
    own_keeps,
    remembered,
    status_of,
    weights,
)
from stoker_operator.plan.canary.stand import (
    Stable,
    Stand,
    World,
    by_route,
    is_open,
    pods_wanted,
    share_of,
    stamp,
    stand_of,
    weight_of,
)
from stoker_operator.plan.diagnose import first_trouble
from stoker_operator.plan.fit import assess, remembered_gpu
from stoker_operator.plan.rollout import old_enough
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

SOON_SECONDS, LOOK_SECONDS, STARTING_SECONDS = 1.0, 10.0, 15.0
# One that stands for long is looked at the more rarely: each look at one that is asked writes its figures.
RAREST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """What to do about a canary: `actions` before anything else of it, `ends` last of all.

    `shared`: the Service leads to its pods too; `share` of the route's requests in percent. `status` is its part of the
    status, {} = none. `keeps` are the names of volumes and sources that are still of use. `mark` names a comparison
    that nobody looked at, "" = it is not asked for. `again`: seconds until it matters again, None = an event will tell.
    """

    actions: tuple[Action, ...] = ()
    ends: tuple[Action, ...] = ()
    shared: bool = False
    share: int = 0
    condition: Condition | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    keeps: frozenset[str] = frozenset()
    mark: str = ""
    again: float | None = None


def plan_canary(
    service: InferenceService, observed: Observed, settings: Settings, stable: Stable, now: datetime
) -> CanaryPlan:
    """Decide on it. `service` is as `as_served` gives it; `now` is aware, UTC."""
    if service.canary is None:
        return CanaryPlan(ends=_ends(service, observed, "spec.canary does not ask for one"))
    there = World(service, service.canary, observed, settings, stable, now)
    before = stand_of(there)
    after = _moved(there, _wished(there, before))
    if after.state in (STARTING, RUNNING, PASSED):
        return _under_way(there, after)
    if after.state == PROMOTING:
        return _kept(there, after)
    said = words.condition(service, after.state, after.why, "")
    ends = _ends(service, observed, _why_gone(after))
    again = SOON_SECONDS if after != before else None
    return CanaryPlan(ends=ends, condition=said, status=status_of(there, after, judged_by(there)), again=again)


def _wished(there: World, stand: Stand) -> Stand:
    """What a person asks for goes before all else."""
    wish, _, name = there.service.canary_wish.partition(" ")
    if there.canary.same:
        return stand if stand.state == IN_SPEC else stand.to(IN_SPEC, there.now)
    if name != stand.name:
        return stand
    if wish == "promote" and stand.state in (STARTING, RUNNING, PASSED):
        return stand.to(PROMOTING, there.now, "somebody promoted it")
    if wish == "abort" and stand.state in (STARTING, RUNNING, PASSED):
        return stand.to(ABORTED, there.now, "somebody took it back")
    if wish == "abort" and stand.state in ADOPTED:
        return stand.to(RETURNING, there.now, "somebody took it back")
    return stand


def _moved(there: World, stand: Stand) -> Stand:
    """What the rollout of the stable pods makes of one that is on its way to all of them, or back."""
    known = known_canary(there.service).get("state")
    if stand.state not in MOVING or known != stand.state:
        return stand  # the pods that were looked at are on no way yet
    if stand.state == PROMOTING and there.stable.failed:
        return stand.to(FAILED, there.now, f"its rollout to all pods failed (revision {there.stable.failed})")
    if there.stable.blocking is not None:
        return stand
    return stand.to(PROMOTED if stand.state == PROMOTING else ABORTED, there.now, stand.why)


def _kept(there: World, stand: Stand, said: Condition | None = None) -> CanaryPlan:
    """Its pods go on as they are: while all pods become what they are, or while its weights are mended."""
    service, share = there.service, share_of(there, stand)
    return CanaryPlan(
        shared=is_open(there) and not by_route(there),
        share=share if by_route(there) else 0,
        condition=said or words.condition(service, stand.state, stand.why, ""),
        status=status_of(there, stand, remembered(there) | counts(there) | {"share": share}),
        keeps=own_keeps(there),
        again=SOON_SECONDS if known_canary(service).get("state") != stand.state else None,
    )


def _under_way(there: World, stand: Stand) -> CanaryPlan:
    """Its weights, its pods, its share, its verdict."""
    service, observed = there.service, there.observed
    live = observed.children.get(("Deployment", manifests.canary_name(service)))
    if service.suspend or (live is None and there.stable.blocking is not None):
        ends = _ends(service, observed, "the service has no pods to compare it with")
        text = "The canary begins once the stable revision serves"
        why = there.stable.blocking.message if there.stable.blocking is not None else "spec.suspend is true"
        said = words.waiting(f"{text}: {why}")
        stand = stand if stand.state == STARTING else stand.to(STARTING, there.now)
        return CanaryPlan(ends=ends, condition=said, status=status_of(there, stand, remembered(there)),
                          keeps=own_keeps(there))  # fmt: skip
    cache = _cache(there)
    if cache.model is None:
        waits = cache.finding.message if cache.finding is not None else "they are being fetched"
        said = words.condition(service, STARTING, "", f"The canary waits for its weights: {waits}")
        if live is not None:
            return _kept(there, stand, said)
        found = status_of(there, stand, weights(cache))
        own = () if cache is there.stable.cache else cache.actions
        keeps = frozenset({cache.claim, cache.source}) | own_keeps(there)
        return CanaryPlan(actions=own, condition=said, status=found, keeps=keeps, again=cache.requeue_after)
    failing = _too_large(there, cache.model) or _broken(there)
    if failing:
        return _given_up(there, stand, failing)
    return _compared(there, stand, cache, cache.model)


def _compared(there: World, stand: Stand, cache: CachePlan, model: FetchedModel) -> CanaryPlan:
    """It has what it needs to run: its pods, and how they do."""
    service, canary, observed = there.service, there.canary, there.observed
    live = observed.children.get(("Deployment", manifests.canary_name(service)))
    wanted = manifests.canary_deployment(service, there.settings, model, pods_wanted(there, stand))
    front = manifests.canary_service(service)
    written = ensure(live, wanted, "a canary beside the stable revision")
    actions = (
        *(() if cache is there.stable.cache else cache.actions),
        *written,
        *ensure(observed.child(front), front, "the canary's own address"),
    )
    state, share, routed = observed.canary.rollout, share_of(there, stand), by_route(there)
    base = CanaryPlan(
        actions=actions,
        shared=is_open(there) and not routed,
        share=share if routed else 0,
        keeps=frozenset({cache.claim, cache.source}),
    )
    more = counts(there) | weights(cache) | {"share": share, "weight": weight_of(there, stand)}
    # Pods that were looked at before the Deployment is written are those of the step before.
    if written or not (is_open(there) and state.settled) or not observed.rollout.ready:
        text = _starting_text(there, pods_wanted(there, stand))
        said = words.condition(service, STARTING, "", text)
        return replace(base, condition=said, status=status_of(there, stand, more), again=STARTING_SECONDS)
    if stand.state == STARTING:
        stand = stand.to(RUNNING, there.now)
    at = words.share_text(service, weight_of(there, stand), share, (state.ready, observed.rollout.ready), routed=routed)
    at = f"Step {stand.step + 1} of {len(canary.shares)}. {at}" if canary.promotes else at
    mark, found = f"{stand.name}/{stand.step}/{stand.since}", observed.canary.comparison
    if found is None:
        said = words.condition(service, stand.state, stand.why, at)
        return replace(base, condition=said, status=status_of(there, stand, more), mark=mark, again=SOON_SECONDS)
    verdict = judge(found, canary, there.now)
    if verdict.kind == BAD:
        return _given_up(there, stand, verdict.why)
    more |= {"comparedSince": stamp(found.since), "stable": words.figures_status(found.stable),
             "canary": words.figures_status(found.canary)}  # fmt: skip
    few = verdict.kind == FEW
    waits = few or verdict.kind == EARLY or there.stable.blocking is not None
    if not waits and stand.state == RUNNING:
        stand = _next(there, stand)
    text = f"{at} {words.compared(found, canary, few=few)}"
    said = words.condition(service, stand.state, stand.why, text, few=few)
    often = max(min(LOOK_SECONDS, canary.window / 5), (there.now - found.since).total_seconds() / 20)
    again = min(often, RAREST_SECONDS) if waits or stand.state == PASSED else SOON_SECONDS
    return replace(base, condition=said, status=status_of(there, stand, more), again=again)


def _next(there: World, stand: Stand) -> Stand:
    """Where one goes from a step in which it was good."""
    if not there.canary.promotes:
        return replace(stand, state=PASSED)
    if stand.step + 1 < len(there.canary.shares):
        return replace(stand.to(RUNNING, there.now), step=stand.step + 1)
    return stand.to(PROMOTING, there.now, "it was as good as the stable revision at every step")


def _given_up(there: World, stand: Stand, why: str) -> CanaryPlan:
    after = stand.to(FAILED, there.now, why.rstrip("."))
    return CanaryPlan(
        ends=_ends(there.service, there.observed, "the canary failed"),
        condition=words.condition(there.service, FAILED, after.why, ""),
        status=status_of(there, after, last_figures(there)),
        again=SOON_SECONDS,
    )


def _cache(there: World) -> CachePlan:
    """The weights of the canary: the stable ones' where it has the same."""
    service = there.service
    variant = service.as_canary
    if manifests.cache_key(variant) == manifests.cache_key(service):
        return there.stable.cache
    known = known_canary(service)
    status = {key: known[key] for key in ("model", "cache") if key in known}
    # A canary is young: what is scheduled of verifications is for what stays.
    once = "OnDownload" if service.cache.verify == "Scheduled" else service.cache.verify
    variant = replace(variant, status=status, cache=replace(variant.cache, verify=once))
    return plan_cache(variant, there.observed.as_canary(), there.settings, there.now)


def _too_large(there: World, model: FetchedModel) -> str:
    """Why it does not fit the GPUs that the spec names; "" = it does, or nobody knows."""
    gpu = there.observed.gpu or remembered_gpu(there.service)
    fit = assess(there.service.as_canary, model, gpu)
    return fit.message if fit is not None and fit.blocks and there.service.resources.fit_check == "Enforce" else ""


def _broken(there: World) -> str:
    """Why its pods will never do; "" = they may. One that serves already may not begin anew: its clients noticed."""
    other = there.observed.canary
    trouble = first_trouble(other.pods)
    known = known_canary(there.service)
    if known.get("state") in (RUNNING, PASSED):
        for pod in other.pods:
            if _ended_since(pod, str(known["since"])):
                text = f"the engine of pod {pod['metadata']['name']} ended while it served"
                return f"{text}. {trouble.said}" if trouble is not None else text
    if trouble is not None and trouble.permanent and old_enough(other.pods, there.now):
        return trouble.said
    if other.rollout.deadline_exceeded:
        return trouble.said if trouble is not None else other.rollout.failed
    return ""


def _ended_since(pod: Mapping[str, Any], since: str) -> bool:
    """Whether a pod's engine ended by itself, after that moment."""
    if "deletionTimestamp" in pod["metadata"]:
        return False
    for item in pod.get("status", {}).get("containerStatuses") or ():
        for state in (item.get("state") or {}, item.get("lastState") or {}):
            at = (state.get("terminated") or {}).get("finishedAt")
            if item["name"] == "engine" and at and datetime.fromisoformat(at) >= datetime.fromisoformat(since):
                return True
    return False


def _starting_text(there: World, wanted: int) -> str:
    """What its pods wait for; so many are `wanted`."""
    other = there.observed.canary
    trouble = first_trouble(other.pods)
    if trouble is not None:
        return f"The canary's pods start. {trouble.message}"
    if not there.observed.rollout.ready:
        return "No stable pod is ready; nothing is compared meanwhile"
    if other.answer is not None and other.answer.error:
        return f"Pod {other.answer.pod} is ready, but a completion asked of it failed: {other.answer.error}"
    return f"The canary's pods start: {other.rollout.updated_ready} of {wanted} are ready"


def _why_gone(stand: Stand) -> str:
    return {PROMOTED: "all pods are what it was", IN_SPEC: "the spec asks for the same"}.get(stand.state, stand.why)


def _ends(service: InferenceService, observed: Observed, why: str) -> tuple[Action, ...]:
    """The end of its Deployment and of its address. Its pods finish their requests first, as all pods do."""
    name = manifests.canary_name(service)
    found = [(kind, observed.children.get((kind, name))) for kind in ("Deployment", "Service")]
    return tuple(
        Delete(kind, name, item["metadata"]["uid"], why)
        for kind, item in found
        if item is not None and "deletionTimestamp" not in item["metadata"]
    )
