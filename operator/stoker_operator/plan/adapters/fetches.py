"""How a model's adapters come to its volume: what the Jobs of each say, and what follows.

Invariants: pure. An adapter is fetched as a model is (plan/cache.py), only that others go on whatever becomes of it; so
many at a time, and none before the model itself.
Knows nothing of pods and of what they serve, but for what they find broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.cache import CachePlan, from_jobs
from stoker_operator.plan.jobs import attempt_of, condition_time, is_finished, source_of
from stoker_operator.settings import Settings
from stoker_operator.spec.adapters import Adapter
from stoker_operator.spec.service import FetchFailure, InferenceService

Object = Mapping[str, Any]
AT_ONCE = 4
# What a pod found broken is mended; it is asked again before another repair begins.
AFTER_REPAIR = timedelta(minutes=2)
_BROKEN = ("ChecksumMismatch", "NotPublished")


def fetches(
    service: InferenceService, observed: Observed, settings: Settings, now: datetime, cache: CachePlan
) -> dict[str, CachePlan]:
    """What the Jobs of each adapter say, and what follows; by name."""
    live = observed.children.get(("PersistentVolumeClaim", cache.claim))
    known = {str(item.get("name")): item for item in service.status.get("adapters") or ()}
    if live is None or "deletionTimestamp" in live["metadata"]:
        return {adapter.name: CachePlan(cache.claim) for adapter in service.model.adapters or ()}
    found, running = {}, 0
    for adapter in service.model.adapters or ():
        earlier = known.get(adapter.name, {})
        alike = manifests.as_model(service, adapter)
        alike = replace(alike, status={"cache": earlier, "model": _remembered(earlier)})
        source = manifests.source_id(alike, live["metadata"]["uid"])
        base = CachePlan(cache.claim, source=source, where=f"spec.model.adapters[name={adapter.name}]")
        jobs = sorted((job for job in observed.jobs if source_of(job) == source), key=attempt_of)
        busy = bool(jobs) and not is_finished(jobs[-1])
        # Its pods are of another kind than the model's: what these found is no matter of an adapter's.
        seen = replace(observed, engine_pods=(), worker_pods=(), progress=None)
        plan = from_jobs(alike, seen, settings, now, base, jobs, _rot(observed, adapter, jobs, earlier, now))
        begins = any(action.event[0] == "Created" for action in plan.actions)
        if begins and not busy and (running >= AT_ONCE or (cache.model or cache.resolved) is None):
            plan = replace(base, attempt=attempt_of(jobs[-1]) if jobs else 0, model=plan.model, resolved=plan.resolved)
            begins = False
        running += busy or begins
        found[adapter.name] = plan
    return found


def _remembered(earlier: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter of the status in the words of a model there."""
    return {**earlier, "resolvedRevision": earlier.get("revision"), "serve": earlier.get("path")}


def _rot(
    observed: Observed, adapter: Adapter, jobs: Sequence[Object], earlier: Mapping[str, Any], now: datetime
) -> FetchFailure | None:
    """What a pod found of the folder that is on the volume, to be mended; None while a repair may still show."""
    ended = condition_time(jobs[-1], "Complete") if jobs else None
    if ended is not None and now - ended < AFTER_REPAIR:
        return None
    for reports in observed.adapters.values():
        for each in reports:
            if each.name == adapter.name and each.reason in _BROKEN and each.digest == earlier.get("digest"):
                return FetchFailure(each.reason, each.message)
    return None
