"""Plans the scheduled verification of a cache: when a Job hashes the files again, and what it found.

Invariants: pure. What a verification found holds until a later one, or a repair, found every file right; a Job that
says nothing (no node, no image, killed) is no verdict, and is followed by another. Only one runs at a time. The pods
that serve are nobody's concern here.
Knows nothing of how a cache is filled and mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.identity import COMPONENT, short_hash
from stoker_operator.manifests.verification import COMPONENT_NAME
from stoker_operator.observe.rollout import is_pending
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Finding, ensure
from stoker_operator.plan.diagnose import fetch_outcome, first_trouble
from stoker_operator.plan.jobs import begun_at, condition_time, delete, is_finished, source_of, time_of
from stoker_operator.plan.wording import sentence
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, FetchFailure, InferenceService

Object = Mapping[str, Any]
# From the beginning of a Job that came to no verdict to the next one.
AGAIN_SECONDS = 600
_ROTTEN = ("ChecksumMismatch", "NotPublished")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verifications have found so far. `at`: when every file was last found right, None = never; `rot`: what was
    found wrong since, `unclear`: why the last Job came to no verdict, "" = it did; `latest`: the last Job that is
    there, finished or not, `stale` those before it.
    """

    at: datetime | None = None
    rot: FetchFailure | None = None
    unclear: str = ""
    latest: Object | None = None
    stale: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What to do now, what to say, and in how many seconds the next one is due (None = nothing is)."""

    actions: tuple[Action, ...] = ()
    condition: Condition | None = None
    due_seconds: float | None = None


def verdict(service: InferenceService, observed: Observed, source: str, fetched: Object | None) -> Verdict:
    """What is known of the files of `source`; `fetched` is the Job that last filled or mended the volume."""
    jobs = sorted((job for job in observed.jobs if is_verification(job) and source_of(job) == source), key=_made)
    latest = jobs[-1] if jobs else None
    cache = service.status.get("cache") or {}
    times = [time_of(str(cache.get("verifiedTime", ""))) if cache.get("source") == source else None]
    times += [condition_time(job, "Complete") for job in jobs]
    if fetched is not None and manifests.is_repair(fetched):
        times.append(condition_time(fetched, "Complete"))
    at = max((time for time in times if time is not None), default=None)
    failed = condition_time(latest, "Failed") if latest is not None else None
    known = Verdict(at, latest=latest, stale=tuple(jobs[:-1]))
    if latest is None or failed is None or (at is not None and at >= failed):
        return known
    outcome = fetch_outcome(_pods(observed, latest), COMPONENT_NAME)
    if isinstance(outcome, FetchFailure) and outcome.reason in _ROTTEN:
        return replace(known, rot=outcome)
    said = outcome.message if isinstance(outcome, FetchFailure) else "its pods left no report"
    return replace(known, unclear=f"Job {latest['metadata']['name']} came to no verdict: {sentence(said)}")


def plan_verification(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    model: FetchedModel | None,
    volume_uid: str,
    known: Verdict,
    now: datetime,
) -> Verification:
    """Begin what is due; take back what nobody asks for. `model` is None while there is nothing to look at."""
    if service.cache.verify != "Scheduled":
        jobs = [job for job in observed.jobs if is_verification(job)]
        return Verification(tuple(action for job in jobs for action in delete(job, "no verification is scheduled")))
    actions: list[Action] = [
        action for job in known.stale for action in delete(job, "a newer verification replaced it")
    ]
    running = known.latest if known.latest is not None and not is_finished(known.latest) else None
    if model is None:
        return Verification(tuple(actions))
    if running is not None:
        wanted = manifests.verify_pod(service, settings, model)
        if manifests.live_template_key(running) == manifests.template_key(wanted):
            return Verification(tuple(actions), _running(observed, running, known))
        actions += delete(running, "it would be made otherwise by now")
    due = now if running is not None else _due(service, known, now)
    if due is not None and now >= due:
        job = manifests.verify_job(service, settings, model, volume_uid, now)
        actions += ensure(None, job, f"the files on volume {manifests.claim_name(service)} are to be hashed again")
        return Verification(tuple(actions), _said(known, now))
    return Verification(tuple(actions), _said(known, due), None if due is None else (due - now).total_seconds())


def rot_finding(service: InferenceService, known: Verdict, mending: Finding | None) -> Finding:
    """What to say of rot, and of what is done about it: nothing, where the files are the user's own."""
    assert known.rot is not None
    since = f" that started after {_stamp(known.at)}" if known.at is not None else ""
    if mending is not None:
        restart = f"once it is mended: kubectl rollout restart deployment {service.name}"
        text = f"{sentence(known.rot.message)} {sentence(mending.message)} Pods{since} may have loaded it; {restart}."
        return Finding("CacheCorrupt", text)
    job = known.latest["metadata"]["name"] if known.latest is not None else ""
    text = f"{sentence(known.rot.message)} Put back what was there, then: kubectl delete job {job}; other weights need "
    text += f"a path of their own in spec.model.uri. Pods{since} may have loaded it."
    return Finding("CacheCorrupt", text, stalled=True)


def is_verification(job: Object) -> bool:
    """Whether a Job hashes what is on a volume, and fetches nothing."""
    return bool((job["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_NAME)


def _due(service: InferenceService, known: Verdict, now: datetime) -> datetime | None:
    """When the next one is to begin; None while what the last one found is being mended."""
    every = service.cache.verify_every
    if known.rot is not None and not service.in_place:
        return None
    last = begun_at(known.latest) if known.latest is not None else None
    begun = last or known.at or published(service) or now
    if known.unclear:
        return begun + timedelta(seconds=min(AGAIN_SECONDS, every))
    # Services that were made, or upgraded, together do not read their volumes together.
    spread = int(short_hash([service.namespace, service.name]), 16) % (every // 10 + 1)
    return begun + timedelta(seconds=every + spread)


def published(service: InferenceService) -> datetime | None:
    """Since when its model is on the volume; None while it is not."""
    for item in service.status.get("conditions") or ():
        if item["type"] == "ModelCached" and item["status"] == "True":
            return time_of(str(item["lastTransitionTime"]))
    return None


def _said(known: Verdict, due: datetime | None) -> Condition | None:
    """CacheVerified while none runs; rot has words of its own (rot_finding)."""
    if known.rot is not None or due is None:
        return None
    if known.unclear:
        text = f"{known.unclear} The next one begins at {_stamp(due)}."
        return Condition("CacheVerified", "Unknown", "NoVerdict", text)
    if known.at is None:
        return Condition("CacheVerified", "Unknown", "NotYet", f"The first verification begins at {_stamp(due)}.")
    text = f"Every file had its sha256 at {_stamp(known.at)}; the next verification begins at {_stamp(due)}."
    return Condition("CacheVerified", "True", "Verified", text)


def _running(observed: Observed, job: Object, known: Verdict) -> Condition | None:
    """CacheVerified while one runs, or waits for its pod."""
    if known.rot is not None:
        return None
    waiting = list(filter(is_pending, _pods(observed, job)))
    trouble = first_trouble(waiting)
    text = f"Job {job['metadata']['name']} hashes every file." if trouble is None else trouble.message
    if known.at is None:
        return Condition("CacheVerified", "Unknown", "Verifying" if trouble is None else trouble.reason, text)
    return Condition("CacheVerified", "True", "Verified", f"Every file had its sha256 at {_stamp(known.at)}. {text}")


def _pods(observed: Observed, job: Object) -> list[Object]:
    """The pods of a verification."""
    uid = job["metadata"]["uid"]
    return [pod for pod in observed.verify_pods if any(item["uid"] == uid for item in _owners(pod))]


def _owners(item: Object) -> list[Object]:
    return item["metadata"].get("ownerReferences") or []


def _made(job: Object) -> tuple[str, str]:
    return str(job["metadata"].get("creationTimestamp", "")), str(job["metadata"]["name"])


def _stamp(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"
