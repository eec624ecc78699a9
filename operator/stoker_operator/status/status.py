"""The status an InferenceService gets: pure, from a plan or from the reason why there is none.

Invariants: a condition's lastTransitionTime moves only when its status does; two equal situations give two
equal statuses, so a reconcile that found nothing new writes nothing.
Knows nothing of the API server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.activation import AWAKE, WAKING, Sleep
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Condition, Finding
from stoker_operator.plan.adapters.plan import AdapterState
from stoker_operator.plan.conditions import ready_conditions, servable
from stoker_operator.plan.endpoint import no_pod_ready
from stoker_operator.plan.fit import Fit
from stoker_operator.plan.plan import Plan
from stoker_operator.plan.scaling import scaling_status
from stoker_operator.plan.sleep.decide import SleepPlan
from stoker_operator.plan.sleep.stay import stamp
from stoker_operator.plan.sleep.words import eta_seconds, wakes_at, waking_step
from stoker_operator.spec.service import InferenceService, model_status, remembered_model
from stoker_operator.status.startup import startup

Status = dict[str, Any]


def from_plan(service: InferenceService, observed: Observed, plan: Plan, now: datetime) -> Status:
    """The status after this plan."""
    state = plan.rollout
    status: Status = {
        "observedGeneration": service.generation,
        "url": manifests.public_url(service),
        **_counts(state),
        **_gpus(service, state),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(manifests.selector(service).items())),
        "cache": _cache(observed, plan),
        "conditions": conditions(service.status, plan.conditions, service.generation, now),
    }
    revisions = {
        "current": state.current,
        "answered": plan.answered,
        "rolledOut": plan.rolled_out,
        "previous": plan.previous,
        "failed": plan.failed,
        "waitingSince": plan.waiting_since,
        "generation": plan.generation,
        "commit": plan.commit,
    }
    status["revisions"] = {key: value for key, value in revisions.items() if value}
    model = plan.cache.model
    if model is not None:
        status["model"] = model_status(model, plan.cache.source)
    elif remembered_model(service.status) is not None:
        # What the running pods serve, and what a return to the earlier source would find in place.
        status["model"] = dict(service.status["model"])
    if plan.follow:
        status["follow"] = dict(plan.follow)
    if plan.adapters.states:
        status["adapters"] = [_adapter(state) for state in plan.adapters.states]
    measured = startup(service.status.get("startup") or {}, observed, plan.rolled_out, plan.cache.source)
    if measured:
        status["startup"] = measured
    scaling = scaling_status(service, observed)
    if scaling:
        status["scaling"] = scaling
    sleep = plan.sleep.sleep
    if sleep is not None and (sleep.since or plan.sleep.stay is not None):
        status["sleep"] = _sleep(service, observed, plan.sleep, sleep, now)
    if plan.canary.status:
        status["canary"] = dict(plan.canary.status)
    if plan.groups:
        status["groups"] = [group.status() for group in plan.groups]
    if plan.fit is not None:
        status["fit"] = _fit(plan.fit)
    return status


def _sleep(service: InferenceService, observed: Observed, plan: SleepPlan, sleep: Sleep, now: datetime) -> Status:
    found: Status = {"state": sleep.state, "since": sleep.since, "why": sleep.why, "wish": sleep.wish}
    if sleep.state == WAKING:
        found |= {"step": waking_step(observed), "etaSeconds": eta_seconds(service, sleep, now)}
    if plan.stay is not None:
        found["until"] = stamp(plan.stay.until)
        if sleep.state == AWAKE:
            found["why"] = plan.stay.why
    elif (start := wakes_at(service, sleep, now)) is not None:
        found["wakesAt"] = stamp(start)
    return {key: value for key, value in found.items() if value != ""}


def _counts(state: Rollout) -> Status:
    return {
        "replicas": state.total,
        "readyReplicas": state.ready,
        "updatedReplicas": state.updated,
        "terminatingReplicas": state.terminating,
    }


def _gpus(service: InferenceService, state: Rollout) -> Status:
    """Those of all replicas; how many a claim brings, nobody here knows."""
    wanted = service.resources
    return {} if wanted.claims else {"gpus": wanted.gpus * wanted.nodes * state.total}


def _fit(fit: Fit) -> dict[str, Any]:
    found = {
        "verdict": fit.verdict,
        "gpuProduct": fit.gpu_product,
        "weightsGiB": fit.weights_gib,
        "kvGiB": fit.kv_gib,
        "workspaceGiB": fit.workspace_gib,
        **({"adaptersGiB": fit.adapters_gib} if fit.adapters_gib else {}),
        **({"statesGiB": fit.states_gib} if fit.states_gib else {}),
        "usable": fit.usable,
        "contextLength": fit.context,
        "requiredGiB": fit.required_gib,
        "gpuGiB": fit.gpu_gib,
        **({"gpuPods": fit.gpu_pods} if fit.gpu_pods > 1 else {}),
    }
    if fit.host is not None:
        numbers = {"hostKvGiB": fit.host.pool, "hostRequiredGiB": fit.host.required, "hostGiB": fit.host.limit}
        found |= {key: round(value, 1) for key, value in numbers.items()}
    return found


def refused(earlier: Mapping[str, Any], generation: int, finding: Finding, state: Rollout, now: datetime) -> Status:
    """The status when this generation could not be carried out: of the pods what they are now, of the rest what was
    known.
    """
    fresh = [*ready_conditions(finding, ""), servable(state, finding, None)]
    fresh += [
        no_pod_ready("")
        for item in earlier.get("conditions") or ()
        if item["type"] == "EndpointReady" and item["status"] == "True" and not state.ready
    ]
    kept = [
        Condition(item["type"], item["status"], item["reason"], item["message"])
        for item in earlier.get("conditions") or ()
        if item["type"] not in {condition.type for condition in fresh}
    ]
    ours = {key: value for key, value in earlier.items() if key != "wake"}
    return ours | {
        "observedGeneration": generation,
        **_counts(state),
        "conditions": conditions(earlier, [*fresh, *kept], generation, now),
    }


def conditions(
    earlier: Mapping[str, Any], wanted: Sequence[Condition], generation: int, now: datetime
) -> list[dict[str, Any]]:
    """Conditions as Kubernetes writes them; each keeps its transition time while its status stays."""
    before = {item["type"]: item for item in earlier.get("conditions") or ()}
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    written = []
    for condition in wanted:
        old = before.get(condition.type)
        same = old is not None and old["status"] == condition.status
        written.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old and same else stamp,
            }
        )
    return sorted(written, key=lambda item: str(item["type"]))


def _adapter(state: AdapterState) -> Status:
    """One adapter; what is published of it is what a later reconcile finds again."""
    known = state.published
    found: Status = {"name": state.name, "state": state.state, "pods": state.pods, "message": state.message}
    found |= {"source": state.source, "attempt": state.attempt} if state.source else {}
    if known is None:
        return found
    return found | {
        "revision": known.resolved_revision, "digest": known.digest, "bytes": known.bytes, "path": known.path,
    }  # fmt: skip


def _cache(observed: Observed, plan: Plan) -> Status:
    cache, progress = plan.cache, observed.progress
    status: Status = {"claim": cache.claim, "source": cache.source, "attempt": cache.attempt}
    status |= {"mode": cache.mode} if not cache.claim else {}
    status |= {"nodes": plan.nodes.copies} if plan.nodes.copies is not None else {}
    status |= {"verifiedTime": cache.verified} if cache.verified else {}
    if cache.model is not None:
        size = cache.model.bytes
        return status | {"progress": "100%", "bytesDone": size, "bytesTotal": size}
    if progress is None or not progress.bytes_total:
        return status | {"progress": "0%"}
    share = min(99, progress.bytes_done * 100 // progress.bytes_total)
    return status | {
        "progress": f"{share}%",
        "bytesDone": progress.bytes_done,
        "bytesTotal": progress.bytes_total,
        "etaSeconds": progress.eta_seconds,
    }
