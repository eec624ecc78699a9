"""The pure planner: (service, what was observed, settings, now) → actions with reasons, conditions, when to
look again.

Invariants: no I/O and no clock; nothing is planned for a service that is being deleted; the Deployment is
only touched once its model is published, so a change of model keeps the old revision serving until then;
when everything is in place the plan has no action.
Knows nothing of how actions are carried out or how a status is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Finding, ensure
from stoker_operator.plan.adapters.plan import AdaptersPlan, list_left, plan_adapters
from stoker_operator.plan.cache import CachePlan, plan_cache
from stoker_operator.plan.canary.decide import CanaryPlan, plan_canary
from stoker_operator.plan.canary.stand import Stable
from stoker_operator.plan.conditions import (
    IDLE,
    fit_condition,
    pod_conditions,
    ready_conditions,
    serving,
    understood_condition,
)
from stoker_operator.plan.diagnose import first_trouble
from stoker_operator.plan.endpoint import endpoint_actions, endpoint_conditions
from stoker_operator.plan.fit import Fit, asks_gpu, assess, remembered_gpu
from stoker_operator.plan.follow.decide import FollowPlan, plan_follow
from stoker_operator.plan.groups.around import has_groups, meeting_place, replaced, shared_secret
from stoker_operator.plan.groups.restarts import Group, group_trouble, groups_of
from stoker_operator.plan.left import left_behind
from stoker_operator.plan.nodes import NodesPlan, plan_nodes
from stoker_operator.plan.pace import look_again, sooner
from stoker_operator.plan.pods import graver, pods_finding, pods_that_count, rolled_out, rotten, silence, warned
from stoker_operator.plan.rollout import RolloutPlan, plan_held, plan_rollout
from stoker_operator.plan.scaling import scaling_actions, scaling_condition
from stoker_operator.plan.sleep.decide import SleepPlan, plan_sleep
from stoker_operator.plan.sleep.stay import staffed
from stoker_operator.plan.sleep.words import sleep_finding
from stoker_operator.plan.turn import reached_before, reached_commit
from stoker_operator.plan.wording import counted
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

# Who is next is woken; this is for what nobody told of.
TURN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one reconcile decided. `answered` is the revision of which a pod answered a completion, `rolled_out` the
    current one if all of its pods were there once, "" = none; `previous` the one before that served, `failed` the one
    that was given up. `rolling`: the current revision is on its way in place of one that served, `troubled` says
    whether with trouble; `generation` is the last one that reached the Deployment, 0 = none, `commit` the followed
    commit that did, and `follow` what is to be remembered of the revision that is followed; `alone`: what failed is its
    own commit, which says nothing of other services. `asks_room` are the specs of a replica's pods, of which it matters
    where they could go; `groups` those that there are.
    """

    actions: tuple[Action, ...]
    conditions: tuple[Condition, ...]
    requeue_after: float | None
    cache: CachePlan
    rollout: Rollout
    fit: Fit | None
    answered: str
    rolled_out: str = ""
    previous: str = ""
    failed: str = ""
    asks_room: Sequence[Mapping[str, Any]] | None = None
    asks_load: bool = False
    asks_gpu: bool = False
    asks_turn: bool = False
    waiting_since: str = ""
    generation: int = 0
    commit: str = ""
    rolling: bool = False
    troubled: bool = False
    sleep: SleepPlan = field(default_factory=SleepPlan)
    follow: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    nodes: NodesPlan = field(default_factory=NodesPlan)
    adapters: AdaptersPlan = field(default_factory=AdaptersPlan)
    canary: CanaryPlan = field(default_factory=CanaryPlan)
    groups: tuple[Group, ...] = ()

    @property
    def asks_more(self) -> bool:
        """Whether something was not looked at on which this plan depends."""
        asked = self.asks_load or self.asks_gpu or self.asks_turn or self.sleep.asks_idle or bool(self.canary.mark)
        return self.asks_room is not None or asked


def make_plan(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> Plan:
    """Decide everything. `service` is as `as_served` gives it; `now` is aware, UTC."""
    cache = plan_cache(service, observed, settings, now)
    gpu = observed.gpu or remembered_gpu(service)
    follow = plan_follow(service, observed, settings, cache, gpu, now)
    service, cache = follow.service, follow.cache
    nodes = plan_nodes(service, observed, settings, cache.model, now)
    adapters = plan_adapters(service, observed, settings, now, cache)
    fit = assess(service, cache.model, gpu) if cache.model else None
    too_large = fit is not None and fit.blocks and service.resources.fit_check == "Enforce"
    sleep = plan_sleep(service, observed, now)
    service = staffed(service, sleep.stay)
    groups = groups_of(service, observed, now)
    if cache.model is not None and not too_large and cache.rot is None:
        rolling = plan_rollout(service, observed, settings, cache.model, now, sleep.no_pods, groups)
    else:
        rolling = plan_held(service, observed, sleep.no_pods)
    state = observed.rollout
    answered = _answered(service, observed)
    trouble = graver(first_trouble(pods_that_count(observed)), group_trouble(groups, observed))
    trouble = trouble or silence(observed) or warned(service, observed)
    done = rolled_out(service, state, answered)
    pods = pods_finding(service, observed, rolling.workload, trouble, done)
    pods = nodes.finding if pods is not None and nodes.finding is not None else pods
    cache = replace(cache, finding=nodes.finding or cache.finding) if cache.model is None else cache
    blocking = _blocking(service, cache, fit if too_large else None, rolling, observed, pods)
    if blocking is None and answered != state.current:
        blocking = _unanswered(observed)
    blocking = sleep_finding(service, observed, sleep.sleep, blocking, now)
    scaling = scaling_condition(service, observed, settings)
    follow = follow.given_up(rolling.failed, observed)
    canary = plan_canary(service, observed, settings, Stable(cache, blocking, rolling.failed), now)
    released: list[Action] = []
    if blocking is None:
        keeps = {*adapters.sources, *canary.keeps}
        released = left_behind(service, observed, cache, *_coming(follow), keeps=keeps)
        released += list_left(service, observed)
    waits_turn = bool(rolling.waits) and blocking is None
    return Plan(
        actions=(
            *_fixed(service, observed, shared=canary.shared),
            *cache.actions,
            *follow.actions,
            *nodes.actions,
            # Pods mount the list.
            *adapters.listing,
            # Requests have another way before pods go.
            *sleep.actions,
            *rolling.workload,
            *shared_secret(service, observed, rolling.workload),
            *rolling.records,
            *adapters.fetching,
            *scaling_actions(service, observed, settings, paused=sleep.paused),
            *canary.actions,
            *endpoint_actions(service, observed, canary.share, grouped=has_groups(service, observed)),
            # Whoever asks them has another way before they go.
            *canary.ends,
            *_replaced(service, observed, rolling, answered),
            *released,
        ),
        conditions=(
            *ready_conditions(blocking, serving(service, state)),
            *pod_conditions(observed, blocking, trouble or rotten(cache), done, rolling.waits),
            *cache.conditions(),
            *([follow.condition] if follow.condition else []),
            *([fit_condition(fit)] if fit else []),
            *endpoint_conditions(service, observed, held=sleep.held(observed)),
            *([sleep.condition] if sleep.condition else []),
            *([scaling] if scaling else []),
            *([adapters.condition] if adapters.condition else []),
            *([canary.condition] if canary.condition else []),
            *([understood_condition(service.unknown)] if service.unknown else []),
        ),
        requeue_after=sooner(
            TURN_SECONDS if waits_turn else look_again(service, observed, cache, blocking, now),
            sooner(
                sooner(sooner(sleep.again, follow.again), sooner(nodes.requeue_after, adapters.requeue_after)),
                canary.again,
            ),
        ),
        cache=cache,
        rollout=state,
        fit=fit,
        answered=answered,
        rolled_out=done,
        previous=rolling.previous,
        failed=rolling.failed,
        asks_room=rolling.asks_room,
        asks_load=rolling.asks_load,
        asks_gpu=cache.model is not None and gpu is None and asks_gpu(service),
        asks_turn=rolling.asks_turn,
        waiting_since=rolling.waiting_since,
        generation=service.generation if rolling.reached else reached_before(service),
        commit=service.followed.commit if rolling.reached else reached_commit(service),
        rolling=bool(rolling.previous and not done and blocking and blocking.reason not in IDLE),
        troubled=trouble is not None,
        sleep=sleep,
        follow=follow.status,
        alone=follow.failed,
        nodes=nodes,
        adapters=adapters,
        canary=canary,
        groups=groups,
    )


def _replaced(service: InferenceService, observed: Observed, rolling: RolloutPlan, answered: str) -> list[Action]:
    """The end of a workload that another one replaces, once that needs nothing more."""
    if rolling.target is None or rolling.workload:
        return []
    return replaced(service, observed, rolling.target, answered, back=bool(rolling.failed))


def _coming(follow: FollowPlan) -> list[CachePlan]:
    """The cache of a commit on its way."""
    return [follow.lead] if follow.lead is not None else []


def _fixed(service: InferenceService, observed: Observed, *, shared: bool) -> list[Action]:
    """The children that depend on the spec alone, but for whether the Service is `shared` with a canary."""
    wanted = [
        (manifests.service_account(service), "the pods' identity, without rights"),
        (manifests.web_service(service, shared=shared), "the address that clients use"),
        (manifests.metrics_service(service), "the addresses that scrapers use"),
        (
            manifests.disruption_budget(service, grouped=has_groups(service, observed)),
            "one pod at a time may be evicted",
        ),
    ]
    found: list[Action] = [
        action for manifest, why in wanted for action in ensure(observed.child(manifest), manifest, why)
    ]
    return [*found, *meeting_place(service, observed)]


def _answered(service: InferenceService, observed: Observed) -> str:
    answer = observed.answer
    if answer is not None and not answer.error:
        return answer.template_hash
    return str((service.status.get("revisions") or {}).get("answered", ""))


def _blocking(
    service: InferenceService,
    cache: CachePlan,
    too_large: Fit | None,
    rolling: RolloutPlan,
    observed: Observed,
    pods: Finding | None,
) -> Finding | None:
    """The first thing, in the order things happen, that keeps this generation from being rolled out."""
    state = observed.rollout
    if cache.model is None:
        return cache.finding or Finding("Fetching", "The model is being fetched.")
    if too_large is not None:
        return Finding("DoesNotFit", too_large.message, stalled=True)
    if service.suspend and not rolling.workload and not state.desired and not state.total:
        return _suspended(state)
    if cache.rot is not None and not pods and reached_before(service) != service.generation:
        text = f"A change waits until the cache is sound. {cache.rot.message}"
        return replace(cache.rot, message=text)
    return rolling.finding or pods


def _suspended(state: Rollout) -> Finding:
    text = "spec.suspend is true: no pods run; the cache and the address are kept."
    if state.terminating:
        ends = "finishes its requests and ends" if state.terminating == 1 else "finish their requests and end"
        text += f" {counted(state.terminating, 'pod')} {ends}."
    return Finding("Suspended", text)


def _unanswered(observed: Observed) -> Finding:
    answer = observed.answer
    if answer is None:
        return Finding("AwaitingAnswer", "The pods are ready; one of them is about to be asked for a completion.")
    return Finding("NoAnswer", f"Pod {answer.pod} is ready, but a completion asked of it failed: {answer.error}")
