"""The pure planner: (service, what was observed, settings, now) → actions with reasons, conditions, when to
look again.

Invariants: no I/O and no clock; nothing is planned for a service that is being deleted; the Deployment is
only touched once its model is published, so a change of model keeps the old revision serving until then;
when everything is in place the plan has no action.
Knows nothing of how actions are carried out or how a status is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.actions import Action, Condition, Delete, Finding, ensure
from stoker_operator.diagnose import Trouble, first_trouble
from stoker_operator.fit import Fit, asks_gpu, assess, remembered_gpu
from stoker_operator.manifests.identity import SOURCE_LABEL
from stoker_operator.plan_cache import CachePlan, plan_cache
from stoker_operator.plan_endpoint import endpoint_actions, endpoint_conditions
from stoker_operator.plan_rollout import RolloutPlan, plan_held, plan_rollout
from stoker_operator.plan_scaling import scaling_actions, scaling_condition
from stoker_operator.rollout import Rollout, is_finished, is_terminating, template_hash
from stoker_operator.settings import Settings
from stoker_operator.snapshot import Observed
from stoker_operator.spec import InferenceService

UNSETTLED_SECONDS = 15.0
UNANSWERED_SECONDS = 5.0
_SOON = ("NoAnswer", "AwaitingAnswer", "WaitingForIdle")
# Not ready by choice: nothing is being done about it and nothing is wrong.
IDLE = ("Suspended", "ScaledToZero", "RolloutPaused")


@dataclass(frozen=True, slots=True)
class Plan:
    """What one reconcile decided. `answered` is the revision of which a pod answered a completion, "" =
    none; `previous` the one before that served, `failed` the one that was given up.
    """

    actions: tuple[Action, ...]
    conditions: tuple[Condition, ...]
    requeue_after: float | None
    cache: CachePlan
    rollout: Rollout
    fit: Fit | None
    answered: str
    previous: str = ""
    failed: str = ""
    asks_capacity: bool = False
    asks_load: bool = False
    asks_gpu: bool = False
    waiting_since: str = ""

    @property
    def asks_more(self) -> bool:
        """Whether something was not looked at on which this plan depends."""
        return self.asks_capacity or self.asks_load or self.asks_gpu


def make_plan(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> Plan:
    """Decide everything. `now` is aware, UTC."""
    cache = plan_cache(service, observed, settings, now)
    gpu = observed.gpu or remembered_gpu(service)
    fit = assess(service, cache.model, gpu) if cache.model else None
    named = service.resources.gpu_products and service.resources.fit_check == "Enforce"
    too_large = fit is not None and fit.verdict == "TooLarge" and bool(named)
    if cache.model is not None and not too_large:
        rolling = plan_rollout(service, observed, settings, cache.model, now)
    else:
        rolling = plan_held(service, observed)
    state = observed.rollout
    answered = _answered(service, observed)
    trouble = first_trouble(_pods_that_count(observed))
    blocking = _blocking(service, cache, fit if too_large else None, rolling, observed, trouble)
    if blocking is None and answered != state.current:
        blocking = _unanswered(observed)
    scaling = scaling_condition(service, observed, settings)
    released = _released(service, observed, cache) if blocking is None else []
    return Plan(
        actions=(
            *_fixed(service, observed),
            *cache.actions,
            *rolling.workload,
            *rolling.records,
            *scaling_actions(service, observed, settings),
            *endpoint_actions(service, observed),
            *released,
        ),
        conditions=(
            *_conditions(service, observed, cache, fit, blocking, trouble),
            *endpoint_conditions(service, observed),
            *([scaling] if scaling else []),
        ),
        requeue_after=_requeue(cache, blocking),
        cache=cache,
        rollout=state,
        fit=fit,
        answered=answered,
        previous=rolling.previous,
        failed=rolling.failed,
        asks_capacity=rolling.asks_capacity,
        asks_load=rolling.asks_load,
        asks_gpu=cache.model is not None and gpu is None and asks_gpu(service),
        waiting_since=rolling.waiting_since,
    )


def _fixed(service: InferenceService, observed: Observed) -> list[Action]:
    """The children that depend on the spec alone."""
    wanted = [
        (manifests.service_account(service), "the pods' identity, without rights"),
        (manifests.web_service(service), "the address that clients use"),
        (manifests.metrics_service(service), "the addresses that scrapers use"),
        (manifests.disruption_budget(service), "one pod at a time may be evicted"),
    ]
    return [action for manifest, why in wanted for action in ensure(observed.child(manifest), manifest, why)]


def _released(service: InferenceService, observed: Observed, cache: CachePlan) -> list[Action]:
    """Caches and Jobs of a source this service no longer serves, once the new one serves."""
    actions: list[Action] = []
    for claim in observed.claims:
        meta = claim["metadata"]
        owners = [reference["uid"] for reference in meta.get("ownerReferences") or ()]
        # A cache that other services own too stays; the last one to leave deletes it. One without owners is retained.
        if meta["name"] != cache.claim and owners == [service.uid] and "deletionTimestamp" not in meta:
            actions.append(
                Delete("PersistentVolumeClaim", meta["name"], meta["uid"], "no service uses this model any more")
            )
    for job in observed.jobs:
        meta = job["metadata"]
        if meta["labels"].get(SOURCE_LABEL) != cache.source and "deletionTimestamp" not in meta:
            actions.append(Delete("Job", meta["name"], meta["uid"], "it fetched a model that is no longer served"))
    return actions


def _answered(service: InferenceService, observed: Observed) -> str:
    answer = observed.answer
    if answer is not None and not answer.error:
        return answer.template_hash
    return str((service.status.get("revisions") or {}).get("answered", ""))


def _pods_that_count(observed: Observed) -> list[Mapping[str, Any]]:
    """The pods whose trouble is this generation's: of the current revision where it is known, and not
    going.
    """
    current = observed.rollout.current
    live = [pod for pod in observed.engine_pods if not is_terminating(pod) and not is_finished(pod)]
    return [pod for pod in live if not current or template_hash(pod) == current]


def _blocking(
    service: InferenceService,
    cache: CachePlan,
    too_large: Fit | None,
    rolling: RolloutPlan,
    observed: Observed,
    trouble: Trouble | None,
) -> Finding | None:
    """The first thing, in the order things happen, that keeps this generation from being rolled out."""
    state = observed.rollout
    if cache.model is None:
        return cache.finding or Finding("Fetching", "The model is being fetched.")
    if too_large is not None:
        return Finding("DoesNotFit", too_large.message, stalled=True)
    if service.suspend and not rolling.workload and not state.desired and not state.total:
        return _suspended(state)
    if rolling.finding is not None:
        return rolling.finding
    if rolling.workload:
        return Finding("RollingOut", "The Deployment was just written; its pods follow.")
    if trouble is not None and trouble.reason == "Unschedulable" and state.terminating:
        text = f"{state.terminating} pods terminate and hold their GPUs until they are gone; then a new pod starts"
        return Finding("RollingOut", f"{text}. {trouble.message}")
    if trouble is not None:
        return Finding(trouble.reason, trouble.message, trouble.permanent)
    if not state.current:
        return Finding("RollingOut", "The Deployment's controller has not taken up the newest revision yet.")
    if not state.settled:
        return _rolling(service, observed)
    if state.desired == 0:
        return Finding("ScaledToZero", "No replicas are asked for.")
    return None


def _suspended(state: Rollout) -> Finding:
    text = "spec.suspend is true: no pods run; the cache and the address are kept."
    if state.terminating:
        text += f" {state.terminating} pods finish their requests and end."
    return Finding("Suspended", text)


def _rolling(service: InferenceService, observed: Observed) -> Finding:
    state = observed.rollout
    text = f"{state.updated_ready} of {state.desired} pods of revision {state.current} are ready"
    old = state.total - state.updated
    if old:
        text += f"; {old} of an older revision still run"
    if state.terminating:
        text += f"; {state.terminating} terminate"
    if state.failed:
        return Finding("RolloutFailed", f"{text}. {state.failed}", stalled=True)
    keys = service.endpoint.api_keys
    if keys is not None and any(_waits_for_volumes(pod) for pod in _pods_that_count(observed)):
        # A volume's Secret that is missing shows in no pod's status, only in the kubelet's events.
        text += f". A pod waits for its volumes: is there a Secret {keys.name} with a key {keys.key}?"
        return Finding("RollingOut", text)
    return Finding("RollingOut", f"{text}.")


def _waits_for_volumes(pod: Mapping[str, Any]) -> bool:
    """Whether a node has the pod and none of its containers was ever started."""
    status = pod.get("status", {})
    statuses = status.get("initContainerStatuses") or ()
    waiting = [(item.get("state") or {}).get("waiting", {}).get("reason") for item in statuses]
    return status.get("phase") == "Pending" and "PodInitializing" in waiting


def _unanswered(observed: Observed) -> Finding:
    answer = observed.answer
    if answer is None:
        return Finding("AwaitingAnswer", "The pods are ready; one of them is about to be asked for a completion.")
    return Finding("NoAnswer", f"Pod {answer.pod} is ready, but a completion asked of it failed: {answer.error}")


def _conditions(
    service: InferenceService,
    observed: Observed,
    cache: CachePlan,
    fit: Fit | None,
    blocking: Finding | None,
    trouble: Trouble | None,
) -> list[Condition]:
    state = observed.rollout
    conditions = [*cache.conditions(), _scheduled(observed)]
    if fit is not None:
        status = {"Fits": "True", "TooLarge": "False"}.get(fit.verdict, "Unknown")
        conditions.append(Condition("Fits", status, fit.verdict, fit.message))
    servable = state.ready > 0
    conditions.append(
        Condition("Servable", "True", "PodsReady", f"{state.ready} of {state.total} pods answer.")
        if servable
        else Condition("Servable", "False", blocking.reason if blocking else "NoPods", _why_not(blocking, trouble))
    )
    return [*ready_conditions(blocking, _serving(service, state)), *conditions]


def _serving(service: InferenceService, state: Rollout) -> str:
    return (
        f"{state.updated_ready} of {state.desired} pods of revision {state.current} are ready, and one answered a "
        f"completion; clients use {manifests.public_url(service)}."
    )


def ready_conditions(blocking: Finding | None, serving: str) -> list[Condition]:
    """Ready, and what kstatus reads: Reconciling and Stalled."""
    if blocking is None:
        return [
            Condition("Ready", "True", "Serving", serving),
            Condition("Reconciling", "False", "Settled", "Nothing is left to do."),
            Condition("Stalled", "False", "Settled", "Nothing is left to do."),
        ]
    idle = blocking.reason in IDLE
    waiting = not blocking.stalled and not idle
    return [
        Condition("Ready", "False", blocking.reason, blocking.message),
        Condition("Reconciling", str(waiting), blocking.reason, blocking.message),
        Condition("Stalled", str(blocking.stalled), blocking.reason, blocking.message),
    ]


def _why_not(blocking: Finding | None, trouble: Trouble | None) -> str:
    if trouble is not None:
        return trouble.message
    return blocking.message if blocking else "No pod is ready."


def _scheduled(observed: Observed) -> Condition:
    pods = _pods_that_count(observed)
    if not pods:
        return Condition("Scheduled", "Unknown", "NoPods", "There are no pods to schedule yet.")
    trouble = next((t for t in (first_trouble([pod]) for pod in pods) if t and t.reason == "Unschedulable"), None)
    if trouble:
        return Condition("Scheduled", "False", trouble.reason, trouble.message)
    return Condition("Scheduled", "True", "Scheduled", "Every pod has a node.")


def _requeue(cache: CachePlan, blocking: Finding | None) -> float | None:
    if cache.requeue_after is not None:
        return cache.requeue_after
    if blocking is None or blocking.reason in (*IDLE, "DoesNotFit", "RolledBack"):
        return None
    return UNANSWERED_SECONDS if blocking.reason in _SOON else UNSETTLED_SECONDS
