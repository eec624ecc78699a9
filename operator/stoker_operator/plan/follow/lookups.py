"""Plans the look-ups of a followed revision: when one is due, and what the last one found.

Invariants: pure. One Job at a time, at most one an interval; after failures they come the more rarely. The last one
that ended is kept until the next one has, so what is known never depends on one that runs.
Knows nothing of what follows from a new commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.fetching.lookup import COMPONENT_NAME, FOLLOWS_LABEL
from stoker_operator.manifests.identity import COMPONENT, short_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Delete
from stoker_operator.plan.diagnose import fetch_outcome, first_trouble
from stoker_operator.plan.jobs import attempt_of, begun_at, condition_time, delete, is_finished, time_of
from stoker_operator.plan.verification import published
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, FetchFailure, InferenceService

Object = Mapping[str, Any]
# So many intervals are the longest pause after failures.
MOST_INTERVALS = 8


@dataclass(frozen=True, slots=True)
class Looked:
    """What to do, what the last look-up found (`commit`, `at`) or why it found nothing, and when the next one is due
    (None = an event tells).
    """

    actions: tuple[Action, ...] = ()
    commit: str = ""
    at: datetime | None = None
    failure: FetchFailure | None = None
    due_seconds: float | None = None


def plan_lookups(
    service: InferenceService, observed: Observed, settings: Settings, now: datetime, *, may_look: bool
) -> Looked:
    """Begin what is due, if one may begin now; take back what nobody asks for any more."""
    mine = [job for job in observed.jobs if is_lookup(job)]
    wanted = service.model.follows if service.model.update_policy == "Follow" and not service.suspend else ""
    ours = sorted((job for job in mine if _follows(job) == wanted), key=_made)
    actions = [action for job in mine if job not in ours for action in _end(job, "nobody follows this")]
    if not wanted:
        return Looked(tuple(actions))
    ended = [job for job in ours if is_finished(job)]
    latest = ended[-1] if ended else None
    actions += [action for job in ended[:-1] for action in _end(job, "a newer one replaced it")]
    commit, at, failure = _found(observed, latest)
    running = [job for job in ours if not is_finished(job)]
    key = manifests.template_key(manifests.lookup_pod(service, settings))
    if running and manifests.live_template_key(running[-1]) == key:
        trouble = first_trouble(_pods(observed, running[-1]))
        failure = FetchFailure(trouble.reason, trouble.message) if trouble is not None else failure
        return Looked(tuple(actions), commit, at, failure)
    actions += [action for job in running for action in _end(job, "it would be made otherwise by now")]
    failures = attempt_of(latest) + 1 if latest is not None and failure is not None else 0
    due = now if running else _due(service, settings, latest, failures, now)
    if now >= due and may_look:
        job = manifests.lookup_job(service, settings, now, failures)
        actions.append(Apply(job, f"{service.model.asked} is to be looked up again", create=True, quiet=True))
        return Looked(tuple(actions), commit, at, failure)
    wait = max((due - now).total_seconds(), 1.0) if may_look else None
    return Looked(tuple(actions), commit, at, failure, wait)


def is_lookup(job: Object) -> bool:
    """Whether a Job looks up what a revision stands for."""
    return bool((job["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_NAME)


def _found(observed: Observed, job: Object | None) -> tuple[str, datetime | None, FetchFailure | None]:
    """(commit, when it was found, why none was) of a Job that ended."""
    if job is None:
        return "", None, None
    outcome, done = fetch_outcome(_pods(observed, job), COMPONENT_NAME), condition_time(job, "Complete")
    if isinstance(outcome, FetchedModel) and done is not None:
        return outcome.resolved_revision, done, None
    failure = outcome if isinstance(outcome, FetchFailure) else None
    text = f"Job {job['metadata']['name']} ended and its pod left no report"
    return "", None, failure or FetchFailure("FetchFailed", text)


def _due(
    service: InferenceService, settings: Settings, latest: Object | None, failures: int, now: datetime
) -> datetime:
    """When the next one is to begin. Services that were made together do not ask together."""
    every = settings.follow_seconds
    spread = int(short_hash([service.namespace, service.name, "follow"]), 16) % (every // 10 + 1)
    begun = begun_at(latest) if latest is not None else None
    last = begun or time_of(service.followed.checked) or published(service) or now
    return last + timedelta(seconds=every * min(2 ** max(failures - 1, 0), MOST_INTERVALS) + spread)


def _end(job: Object, why: str) -> list[Action]:
    return [Delete(each.kind, each.name, each.uid, each.reason, quiet=True) for each in delete(job, why)]


def _pods(observed: Observed, job: Object) -> list[Object]:
    uid = job["metadata"]["uid"]
    owners = ((pod, pod["metadata"].get("ownerReferences") or ()) for pod in observed.lookup_pods)
    return [pod for pod, references in owners if any(item["uid"] == uid for item in references)]


def _follows(job: Object) -> str:
    return str((job["metadata"].get("labels") or {}).get(FOLLOWS_LABEL, "")) or "none"


def _made(job: Object) -> tuple[str, str]:
    return str(job["metadata"].get("creationTimestamp", "")), str(job["metadata"]["name"])
