"""Writes the status of a service, where it says something new.

Invariants: a status is compared whole before it is written, but for conditions of other writers; every change of
Ready's status or reason is told by one event, and so is rot that a verification finds, and that it is mended,
a new commit of what is followed, and each turn that a canary takes.
Knows nothing of what a status says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from stoker_operator import metrics
from stoker_operator.apply.events import Telling, service_key
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.canary import ABORTED, FAILED, PASSED, PROMOTED
from stoker_operator.plan.conditions import STAGES, TYPES

log = logging.getLogger("stoker.operator")
# The activator's wish that a service wakes.
OTHERS = ("wake",)


async def write_status(
    cluster: Cluster, service: Mapping[str, Any], status: Mapping[str, Any], telling: Telling
) -> Mapping[str, Any] | None:
    """Write the status if it says something new, with the events of what is news. Returns the service with it, None
    where nothing was written.
    """
    earlier = service.get("status") or {}
    if not differs(earlier, status):
        return None
    meta = service["metadata"]
    manifest = {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "status": dict(status),
    }
    try:
        written = await cluster.apply(kinds.INFERENCE_SERVICE, manifest, subresource="status")
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    _count_canary(earlier, status)
    for kind, told in _news(earlier, status):
        log.info("%s/%s: %s: %s", *service_key(service), told["reason"], told["message"])
        telling.tell(kind, told["reason"], told["message"])
    return written


def _news(earlier: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(Normal or Warning, the condition) of what is told by an event."""
    before, after = _condition(earlier, "Ready"), _condition(status, "Ready")
    if after and (not before or (before["status"], before["reason"]) != (after["status"], after["reason"])):
        yield "Normal" if after["reason"] in STAGES else "Warning", after
    before, after = _condition(earlier, "CacheVerified"), _condition(status, "CacheVerified")
    said = (before.get("status"), after.get("status"))
    if after and said[0] != said[1] and "False" in said:
        yield "Warning" if said[1] == "False" else "Normal", after
    before, after = _condition(earlier, "Following"), _condition(status, "Following")
    moved = (before.get("reason"), _found(earlier)) != (after.get("reason"), _found(status))
    if after and moved and (after["reason"] == "NewCommit" or "False" in (before.get("status"), after["status"])):
        yield "Warning" if after["status"] == "False" else "Normal", after
    before, after = _condition(earlier, "Canary"), _condition(status, "Canary")
    if after and before.get("reason") != after["reason"]:
        yield "Warning" if after["reason"] == "CanaryFailed" else "Normal", after


def _count_canary(earlier: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    """Count where a canary came to."""
    before, after = ((each.get("canary") or {}).get("state") for each in (earlier, status))
    if after != before and after in (PASSED, PROMOTED, FAILED, ABORTED):
        metrics.CANARIES.labels(result=str(after).lower()).inc()


def _found(status: Mapping[str, Any]) -> str:
    """The commit that is to follow; "" = none."""
    return str((status.get("follow") or {}).get("found", ""))


def differs(earlier: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether ours differs from what is there; what other writers say there is not ours to compare."""
    there = {key: value for key, value in earlier.items() if key not in OTHERS}
    if "conditions" in there:
        kept = (item for item in there["conditions"] if item["type"] in TYPES)
        there["conditions"] = sorted(kept, key=lambda item: str(item["type"]))
    return there != dict(status)


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """One condition; {} while there is none."""
    return next((item for item in status.get("conditions") or () if item["type"] == kind), {})
