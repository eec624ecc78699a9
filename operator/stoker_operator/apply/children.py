"""Carries out the actions of a plan: the only writer of a service's children.

Invariants: an action that fails does not keep the others from being tried; an object that belongs to somebody else is
never taken over, and where nothing of a service is there yet, one such name keeps all of it from being made; every
action carried out is told by an event, unless it is quiet.
Knows nothing of why; the plan carries the reasons.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_operator import metrics
from stoker_operator.apply.events import Telling, service_key
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests import applied_hash
from stoker_operator.manifests.identity import CACHE_LABEL, INSTANCE, MANAGED_BY
from stoker_operator.plan.actions import Action, Apply, Generate
from stoker_operator.spec.service import KIND

log = logging.getLogger("stoker.operator")
_SIGNS = (MANAGED_BY, INSTANCE, CACHE_LABEL)


class NameTaken(Exception):
    """A child's name is in use by an object that is not this service's."""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of actions: one sentence for each that the API server refused, and the objects that applies made, by
    kind and name.
    """

    failures: list[str] = field(default_factory=list)
    applied: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)


async def carry_out(
    cluster: Cluster, service: Mapping[str, Any], actions: tuple[Action, ...], telling: Telling, *, first: bool
) -> Done:
    """Do every action, in order; `first`: nothing of the service is there yet."""
    refused = await _names_taken(cluster, service, actions)
    if refused and first:
        actions = tuple(action for action in actions if id(action) in refused)
    done = Done()
    for action in actions:
        try:
            if id(action) in refused:
                raise refused[id(action)]
            if not await _do(cluster, service, action, done.applied):
                continue
        except (ApiError, NameTaken) as error:
            if isinstance(error, ApiError) and error.status == 409 and isinstance(action, Apply) and action.patch:
                continue  # somebody was faster: the next look sees it as it is now
            subject = action.event[1].partition(":")[0]
            said = f"{subject} failed: {error.message if isinstance(error, ApiError) else error}"
            advice = action.if_refused if isinstance(action, Apply) else ""
            done.failures.append(f"{said.rstrip('.')}; {advice}" if advice else said)
            log.warning("%s/%s: %s", *service_key(service), done.failures[-1])
            continue
        reason, message = action.event
        log.info("%s/%s: %s", *service_key(service), message)
        if not action.quiet:
            telling.tell("Normal", reason, message)
    return done


async def _do(
    cluster: Cluster, service: Mapping[str, Any], action: Action, applied: dict[tuple[str, str], Mapping[str, Any]]
) -> bool:
    """Whether there was anything to do; an object that was applied is put into `applied`."""
    namespace = service["metadata"]["namespace"]
    if isinstance(action, Generate):
        return await _generate(cluster, namespace, action)
    if isinstance(action, Apply):
        kind = kinds.BY_NAME[action.manifest["kind"]]
        name = action.manifest["metadata"]["name"]
        if action.patch is not None:
            applied[kind.kind, name] = await cluster.merge(kind, namespace, name, action.patch)
        else:
            applied[kind.kind, name] = await cluster.apply(kind, action.manifest)
        metrics.ACTIONS.labels(verb="apply", kind=kind.kind).inc()
        return True
    kind = kinds.BY_NAME[action.kind]
    await cluster.delete(kind, namespace, action.name, action.uid, foreground=action.foreground)
    metrics.ACTIONS.labels(verb="delete", kind=kind.kind).inc()
    return True


async def _generate(cluster: Cluster, namespace: str, action: Generate) -> bool:
    """Make a Secret with a value of its own, known to nobody; one that is there is left as it is."""
    owner = await cluster.get(kinds.BY_NAME[action.owner[0]], namespace, action.owner[1])
    if owner is None:
        return False  # what keeps it from being there is told already
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        key: owner["metadata"][key] for key in ("name", "uid")
    }
    meta = {**action.manifest["metadata"], "ownerReferences": [reference]}
    made = {**action.manifest, "metadata": meta, "stringData": {action.key: secrets.token_urlsafe(32)}}
    try:
        await cluster.create(kinds.SECRET, made)
    except ApiError as error:
        if error.status != 409:
            raise
        return False
    metrics.ACTIONS.labels(verb="create", kind=kinds.SECRET.kind).inc()
    return True


async def _names_taken(
    cluster: Cluster, service: Mapping[str, Any], actions: tuple[Action, ...]
) -> dict[int, NameTaken | ApiError]:
    """What keeps actions, by their id, from making their object. All names are looked up before anything is made."""
    found: dict[int, NameTaken | ApiError] = {}
    for action in actions:
        if isinstance(action, Apply) and action.create:
            try:
                await _refuse_foreign(cluster, service, action.manifest)
            except (ApiError, NameTaken) as error:
                found[id(action)] = error
    return found


async def _refuse_foreign(cluster: Cluster, service: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Applying with force would take over a stranger's object of the same name: look first."""
    meta, kind = manifest["metadata"], kinds.BY_NAME[manifest["kind"]]
    there = await cluster.get(kind, meta["namespace"], meta["name"])
    if there is not None and not _is_ours(there, service, manifest):
        raise NameTaken(
            f"{kind.kind} {meta['name']} exists and is not this service's; delete it or name the service otherwise"
        )


def _is_ours(there: Mapping[str, Any], service: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Whether a live object belongs to this service: by its owner's uid, never by labels, which anybody may write.

    A cache's volume belongs to all services of its source. What an earlier service of this name left, or one that was
    deleted without its children, is taken up again.
    """
    meta, wanted = there["metadata"], manifest["metadata"]
    owners = meta.get("ownerReferences") or ()
    if any(item["uid"] == service["metadata"]["uid"] for item in owners):
        return True
    labels, ours = meta.get("labels") or {}, wanted["labels"]
    same = applied_hash(there) != "" and all(labels.get(key) == ours[key] for key in _SIGNS if key in ours)
    if CACHE_LABEL in ours and INSTANCE not in ours:
        return same
    earlier = all(item["kind"] == KIND and item["name"] == service["metadata"]["name"] for item in owners)
    return same and earlier
