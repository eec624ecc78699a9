"""Carries out a plan and writes the status: the only writer of children, statuses and events.

Invariants: an action that fails does not keep the others from being tried; an object that belongs to
somebody else is never taken over; an event is written for every action carried out and for every change of
the Ready reason, so a reconcile that changes nothing writes nothing.
Knows nothing of why; the plan carries the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stoker_operator import metrics
from stoker_operator.cluster import api as kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.identity import CACHE_LABEL, FIELD_MANAGER, INSTANCE, MANAGED_BY
from stoker_operator.plan.actions import Action, Apply

log = logging.getLogger("stoker.operator")
# Reasons that are a stage on the way, not a failure.
STAGES = frozenset(
    {
        "Serving",
        "CreatingVolume",
        "Fetching",
        "RollingOut",
        "PodsStarting",
        "PodsStopping",
        "WaitingForIdle",
        "AwaitingAnswer",
        "Suspended",
        "ScaledToZero",
        "RolloutPaused",
    }
)


class NameTaken(Exception):
    """A child's name is in use by an object that is not this service's."""


async def carry_out(cluster: Cluster, service: Mapping[str, Any], actions: tuple[Action, ...]) -> list[str]:
    """Do every action, in order. Returns one sentence for each that the API server refused."""
    failures = []
    for action in actions:
        try:
            await _do(cluster, service, action)
        except (ApiError, NameTaken) as error:
            subject = action.event[1].partition(":")[0]
            failures.append(f"{subject} failed: {error.message if isinstance(error, ApiError) else error}")
            log.warning("%s/%s: %s", *_key(service), failures[-1])
            continue
        reason, message = action.event
        log.info("%s/%s: %s", *_key(service), message)
        await record_event(cluster, service, "Normal", reason, message)
    return failures


async def _do(cluster: Cluster, service: Mapping[str, Any], action: Action) -> None:
    namespace = service["metadata"]["namespace"]
    if isinstance(action, Apply):
        kind = kinds.BY_NAME[action.manifest["kind"]]
        if action.create:
            await _refuse_foreign(cluster, kind, action.manifest)
        await cluster.apply(kind, action.manifest)
        metrics.ACTIONS.labels(verb="apply", kind=kind.kind).inc()
        return
    kind = kinds.BY_NAME[action.kind]
    await cluster.delete(kind, namespace, action.name, action.uid)
    metrics.ACTIONS.labels(verb="delete", kind=kind.kind).inc()


async def _refuse_foreign(cluster: Cluster, kind: kinds.Kind, manifest: Mapping[str, Any]) -> None:
    """Applying with force would take over a stranger's object of the same name: look first."""
    meta = manifest["metadata"]
    there = await cluster.get(kind, meta["namespace"], meta["name"])
    if there is None:
        return
    labels = there["metadata"].get("labels") or {}
    for label in (MANAGED_BY, INSTANCE, CACHE_LABEL):
        if label in meta["labels"] and labels.get(label) != meta["labels"][label]:
            raise NameTaken(
                f"{kind.kind} {meta['name']} exists and is not this service's; delete it or name the service otherwise"
            )


async def write_status(cluster: Cluster, service: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Write the status if it says something new, with an event when the reason of Ready changed."""
    earlier = service.get("status") or {}
    if not _differs(earlier, status):
        return False
    meta = service["metadata"]
    manifest = {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "status": dict(status),
    }
    try:
        await cluster.apply(kinds.INFERENCE_SERVICE, manifest, subresource="status")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    before, after = _ready(earlier), _ready(status)
    if after and (not before or (before["status"], before["reason"]) != (after["status"], after["reason"])):
        kind = "Normal" if after["reason"] in STAGES else "Warning"
        log.info("%s/%s: %s: %s", *_key(service), after["reason"], after["message"])
        await record_event(cluster, service, kind, after["reason"], after["message"])
    return True


def _differs(earlier: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether ours differs from what is there; conditions of other writers are not ours to compare."""
    ours = {
        "Ready",
        "Servable",
        "Degraded",
        "Progressing",
        "Reconciling",
        "Stalled",
        "ModelResolved",
        "ModelCached",
        "Scheduled",
        "Fits",
        "AutoscalingActive",
        "EndpointReady",
        "Monitored",
    }
    there = dict(earlier)
    if "conditions" in there:
        kept = (item for item in there["conditions"] if item["type"] in ours)
        there["conditions"] = sorted(kept, key=lambda item: str(item["type"]))
    return there != dict(status)


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((item for item in status.get("conditions") or () if item["type"] == "Ready"), None)


async def record_event(cluster: Cluster, service: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
    """Write an event on the service; `kind` is Normal or Warning. A refusal is logged: events are not
    state.
    """
    meta, now = service["metadata"], datetime.now(UTC)
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": service["apiVersion"],
            "kind": service["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "count": 1,
        "firstTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lastTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": "stoker.dev/operator",
        "reportingInstance": FIELD_MANAGER,
    }
    try:
        await cluster.create(kinds.EVENT, event)
    except ApiError as error:
        log.warning("%s/%s: event %s was not recorded: %s", *_key(service), reason, error)


def _key(service: Mapping[str, Any]) -> tuple[str, str]:
    return service["metadata"]["namespace"], service["metadata"]["name"]
