"""Carries out the actions of a plan: the only writer of a service's children.

Invariants: an action that fails does not keep the others from being tried; an object that belongs to somebody else is
never taken over; every action carried out is told by an event.
Knows nothing of why; the plan carries the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from stoker_operator import metrics
from stoker_operator.apply.events import record_event, service_key
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.identity import CACHE_LABEL, INSTANCE, MANAGED_BY
from stoker_operator.plan.actions import Action, Apply

log = logging.getLogger("stoker.operator")


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
            said = f"{subject} failed: {error.message if isinstance(error, ApiError) else error}"
            advice = action.if_refused if isinstance(action, Apply) else ""
            failures.append(f"{said.rstrip('.')}; {advice}" if advice else said)
            log.warning("%s/%s: %s", *service_key(service), failures[-1])
            continue
        reason, message = action.event
        log.info("%s/%s: %s", *service_key(service), message)
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
