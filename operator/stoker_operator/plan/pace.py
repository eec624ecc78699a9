"""When a service is looked at again, where no event would tell.

Invariants: pure. What moves is looked at often, what stands still the more rarely the longer it does: five hundred
services that wait for a person must cost next to nothing. Events of children come on top, whatever is said here.
Knows nothing of why a service waits.
"""

from __future__ import annotations

from datetime import datetime

from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Finding
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.conditions import IDLE
from stoker_operator.spec.service import InferenceService

UNSETTLED_SECONDS = 15.0
UNANSWERED_SECONDS = 5.0
# A little longer than the slow round of all services (settings.resync_seconds), so that one look serves both.
RAREST_SECONDS = 330.0
# Nothing tells when a kind comes, and which kinds there are is asked once a minute (cluster/api.py): a little later.
KIND_SECONDS = 65.0
# Nothing tells when a pod begins to answer.
RAREST_UNANSWERED_SECONDS = 30.0
_UNANSWERED = ("NoAnswer", "AwaitingAnswer")


def look_again(
    service: InferenceService, observed: Observed, cache: CachePlan, blocking: Finding | None, now: datetime
) -> float | None:
    """Seconds until then; None = an event will tell."""
    found = _look_again(service, observed, cache, blocking, now)
    return sooner(sooner(found, cache.verify_after), KIND_SECONDS if _lacks_kind(service, observed) else None)


def _lacks_kind(service: InferenceService, observed: Observed) -> bool:
    """Whether the spec asks by name for an object of a kind that this cluster does not serve, or not yet."""
    endpoint, scaling = service.endpoint, service.autoscaling
    asked = {
        "InferencePool": endpoint.inference_pool is not None,
        "HTTPRoute": endpoint.http_route is not None,
        "LeaderWorkerSet": service.resources.spans_nodes,
        "ScaledObject": scaling is not None and scaling.engine == "KEDA",
    }
    return bool({kind for kind, wanted in asked.items() if wanted} - observed.served - observed.without)


def _look_again(
    service: InferenceService, observed: Observed, cache: CachePlan, blocking: Finding | None, now: datetime
) -> float | None:
    """As `look_again`, but for verifications."""
    due = cache.requeue_after
    if cache.exact:
        return due
    if blocking is None or blocking.reason in (*IDLE, "DoesNotFit", "RolledBack"):
        return due
    if blocking.reason == "WaitingForIdle":
        return UNANSWERED_SECONDS
    soonest = due if due is not None else UNANSWERED_SECONDS if blocking.reason in _UNANSWERED else UNSETTLED_SECONDS
    if observed.progress is not None:
        return soonest
    rarest = RAREST_UNANSWERED_SECONDS if blocking.reason in _UNANSWERED else RAREST_SECONDS
    return max(soonest, min(_unready_for(service, now) / 10, rarest))


def sooner(one: float | None, other: float | None) -> float | None:
    """The earlier of two looks; None = never."""
    return min((each for each in (one, other) if each is not None), default=None)


def _unready_for(service: InferenceService, now: datetime) -> float:
    """Seconds since the service was last ready, or was made; 0 where its status does not say."""
    for item in service.status.get("conditions") or ():
        if item["type"] == "Ready" and item["status"] != "True":
            return (now - datetime.fromisoformat(item["lastTransitionTime"])).total_seconds()
    return 0.0
