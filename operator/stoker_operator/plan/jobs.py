"""What the objects of prefetch Jobs say: which attempt they are, of what, and how they ended.

Invariants: pure. A Job is known by its labels (source and attempt), so its pods are known by the same.
Knows nothing of what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker_operator.manifests.identity import ATTEMPT_LABEL, BEGUN, SOURCE_LABEL
from stoker_operator.observe import rollout
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Delete
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]


def pods_of(observed: Observed, job: Object) -> list[Object]:
    """The prefetch pods of a Job."""
    wanted = (source_of(job), _label(job, ATTEMPT_LABEL))
    return [pod for pod in observed.fetch_pods if (source_of(pod), _label(pod, ATTEMPT_LABEL)) == wanted]


def tells_later(observed: Observed, job: Object) -> bool:
    """Whether a Job is complete and a pod of it is still seen running: the watch of pods is behind that of Jobs, and
    brings the report.
    """
    return condition_time(job, "Complete") is not None and not all(map(rollout.is_finished, pods_of(observed, job)))


def source_of(item: Object) -> str:
    """The source that a Job, or a pod of one, fetches, and onto which volume: as manifests.source_id names it."""
    return _label(item, SOURCE_LABEL)


def attempt_of(job: Object) -> int:
    """Its number, from 1; 0 when it carries none."""
    text = _label(job, ATTEMPT_LABEL)
    return int(text) if text.isdigit() else 0


def earlier_attempt(service: InferenceService, source: str) -> int:
    """The attempt at a source that the status tells of; 0 = none."""
    cache = service.status.get("cache") or {}
    return int(cache.get("attempt", 0)) if cache.get("source") == source else 0


def is_finished(job: Object) -> bool:
    """Whether its controller is done with it, one way or the other."""
    return condition_time(job, "Complete") is not None or condition_time(job, "Failed") is not None


def condition_time(job: Object, wanted: str) -> datetime | None:
    """Since when a condition of it is True; None when it is not."""
    for item in job.get("status", {}).get("conditions") or ():
        if item["type"] == wanted and item["status"] == "True":
            return time_of(item["lastTransitionTime"])
    return None


def begun_at(job: Object) -> datetime | None:
    """When it was begun, by the operator's clock; None where nobody noted it."""
    return time_of(str((job["metadata"].get("annotations") or {}).get(BEGUN, "")))


def time_of(text: str) -> datetime | None:
    """A time as Kubernetes writes it; None for none."""
    return datetime.fromisoformat(text) if text else None


def delete(job: Object, reason: str) -> list[Delete]:
    """The action that ends it; none while it is being deleted."""
    meta = job["metadata"]
    return [] if "deletionTimestamp" in meta else [Delete("Job", meta["name"], meta["uid"], reason)]


def _label(item: Object, label: str) -> str:
    return str((item["metadata"].get("labels") or {}).get(label, ""))
