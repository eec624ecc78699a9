"""Plans the model cache: the shared volume, the prefetch Job, its retries, and repair of a corrupt cache.

Invariants: pure. A result is believed only for the pair (source, volume) it was made for. A failed attempt
is followed by another after a delay that doubles, for ever: what a person repairs is picked up without
telling the operator, and a changed spec or chart is tried at once, whatever the attempt before is waiting for.
Knows nothing of what the model is used for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stoker_operator.manifests import (
    claim_name,
    is_repair,
    owns_claim,
    prefetch_job,
    source_id,
    template_key,
    volume_claim,
)
from stoker_operator.manifests.fetching.fill import is_fill
from stoker_operator.manifests.revision import live_template_key
from stoker_operator.observe import rollout
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Finding, ensure
from stoker_operator.plan.diagnose import fetch_advice, fetch_outcome, first_trouble, verify_failure
from stoker_operator.plan.drift import first_difference
from stoker_operator.plan.jobs import (
    attempt_of,
    begun_at,
    condition_time,
    delete,
    earlier_attempt,
    is_finished,
    pods_of,
    source_of,
    tells_later,
    time_of,
)
from stoker_operator.plan.verification import is_verification, plan_verification, rot_finding, verdict
from stoker_operator.plan.wording import sentence
from stoker_operator.settings import Settings
from stoker_operator.spec.model import HUBS
from stoker_operator.spec.quantity import human_bytes
from stoker_operator.spec.service import FetchedModel, FetchFailure, InferenceService, remembered_model

Object = Mapping[str, Any]
POLL_SECONDS = 5.0
SLOWEST_POLL_SECONDS = 30.0
STARTING_SECONDS = 10.0
# No event tells of a claim that is not ours.
MISSING_SECONDS = 15.0
FIRST_DELAY_SECONDS = 30
LONGEST_DELAY_SECONDS = 600
# A volume that was just asked for is not there yet, and the scheduler says so at once.
PLACING_SECONDS = 20
# The fetch process's own verdict that trying again changes nothing: see the contract in operator/README.md.
PERMANENT = ("TokenRejected", "RevisionNotFound", "ModelNotFound", "VolumeFull", "BadRequest")
# What ModelCached says where pods share no volume.
_NO_VOLUME = {
    "Node": "was fetched and verified; pods read the copy on their node's own disk.",
    "Image": "is the image that was looked up; nodes pull that very one, and pods mount it.",
    "None": "was fetched and verified; each pod fetches it for itself and is held to that digest.",
}
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_REMAKE = "if it is the size that cannot change: kubectl delete pvc {claim}; the volume is made anew in the new size"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What to do for the cache, and how it stands. `model` is None until it is published and sound. `exact`: something
    is due after `requeue_after`, not only to be looked at. `rot`: what a scheduled verification found of a model that
    serves meanwhile; `verified`: when all of it was last found right, as Kubernetes writes times; `verify_after`:
    seconds until the next verification; `where`: the field that names the source.
    """

    claim: str
    source: str = ""
    attempt: int = 0
    actions: tuple[Action, ...] = ()
    model: FetchedModel | None = None
    finding: Finding | None = None
    requeue_after: float | None = None
    exact: bool = False
    resolved: FetchedModel | None = None
    in_place: bool = False
    mode: str = "Auto"
    rot: Finding | None = None
    verified: str = ""
    verify_after: float | None = None
    verification: Condition | None = None
    where: str = "spec.model"

    def conditions(self) -> list[Condition]:
        """ModelResolved and ModelCached; CacheVerified where verifications are scheduled."""
        found = self._conditions()
        return [*found, self.verification] if self.verification is not None else found

    def _conditions(self) -> list[Condition]:
        known = self.model or self.resolved
        waiting = self.finding or Finding("Fetching", "the prefetch has not reported yet")
        if known is None:
            resolved = Condition("ModelResolved", "False", waiting.reason, waiting.message)
        else:
            message = f"Revision {known.resolved_revision}, {human_bytes(known.bytes)}."
            resolved = Condition("ModelResolved", "True", "Resolved", message)
        if self.model is None:
            return [resolved, Condition("ModelCached", "False", waiting.reason, waiting.message)]
        if self.rot is not None:
            return [resolved, Condition("ModelCached", "False", self.rot.reason, self.rot.message)]
        if self.in_place:
            text = f"{self.model.digest} was hashed where it lies, on volume {self.claim}; nothing was copied."
            return [resolved, Condition("ModelCached", "True", "InPlace", text)]
        if self.mode in _NO_VOLUME:
            text = f"{self.model.digest} {_NO_VOLUME[self.mode]}"
            return [resolved, Condition("ModelCached", "True", "Published", text)]
        message = f"{self.model.digest} is published and verified on volume {self.claim}."
        return [resolved, Condition("ModelCached", "True", "Published", message)]


def plan_cache(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> CachePlan:
    """Decide the next step of the cache."""
    if not service.cache.has_volume:
        return _without_volume(service, observed, settings, now)
    name, ours = claim_name(service), owns_claim(service)
    live = observed.children.get(("PersistentVolumeClaim", name))
    base = CachePlan(name, in_place=service.in_place)
    if live is None and not ours:
        where = "spec.model.uri" if service.in_place else "spec.cache.pvc.existingClaim"
        text = f"PersistentVolumeClaim {name}, which {where} names, does not exist in this namespace. Create it."
        return replace(base, finding=Finding("VolumeMissing", text, stalled=True), requeue_after=MISSING_SECONDS)
    claim = ensure(live, volume_claim(service, settings, live), "it holds the model") if ours else []
    claim = [replace(action, if_refused="" if action.create else _REMAKE.format(claim=name)) for action in claim]
    if live is None:
        return replace(base, actions=tuple(claim), finding=Finding("CreatingVolume", f"Creating volume {name}."),
                       requeue_after=1.0)  # fmt: skip
    source = source_id(service, live["metadata"]["uid"])
    jobs = sorted((job for job in observed.jobs if source_of(job) == source), key=attempt_of)
    if "deletionTimestamp" in live["metadata"]:
        after = "it is made anew once it is gone" if ours else "make it anew once it is gone"
        text = f"Volume {name} is being deleted; {after}. {_held_by(observed)}"
        # Kubernetes keeps a volume as long as a pod names it, the pods of a finished Job too.
        freed = [action for job in jobs for action in delete(job, f"volume {name} is being deleted")]
        return replace(
            base, actions=tuple(freed), finding=Finding("VolumeTerminating", text), requeue_after=POLL_SECONDS
        )
    base = replace(base, source=source, actions=tuple(claim))
    return _looked_after(service, observed, settings, now, base, jobs)


def _without_volume(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> CachePlan:
    """Where pods share no volume, a Job finds out what the model is: on some node, which then has its copy, or in a
    folder of the Job's own.
    """
    mode = service.cache.mode
    if mode == "Node" and not settings.node_cache_class:
        text = "spec.cache.mode is Node, and the chart's nodeCache.enabled is false: switch it on, or choose mode PVC."
        return CachePlan("", mode=mode, finding=Finding("FeatureOff", text, stalled=True))
    source = source_id(service, mode)
    jobs = sorted((job for job in observed.jobs if source_of(job) == source), key=attempt_of)
    return _looked_after(service, observed, settings, now, CachePlan("", source=source, mode=mode), jobs)


def _held_by(observed: Observed) -> str:
    """What keeps a volume that is being deleted: Kubernetes counts a pod that is over, too, and nobody ends that."""
    over = [pod for pod in observed.serving_pods if rollout.is_finished(pod) and not rollout.is_terminating(pod)]
    if not over:
        return "It waits for the pods that use it."
    names = " ".join(sorted(pod["metadata"]["name"] for pod in over))
    return f"It waits for the pods that use it, those that are over too: kubectl delete pod {names}."


def _looked_after(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    now: datetime,
    base: CachePlan,
    jobs: list[Object],
) -> CachePlan:
    """The volume is there: what its prefetch Jobs say of it, and its verifications."""
    fetches = [job for job in jobs if not is_verification(job) and not is_fill(job)]
    latest = fetches[-1] if fetches else None
    known = verdict(service, observed, base.source, latest)
    rot = known.rot if service.cache.verify == "Scheduled" else None
    mends = rot if not service.in_place else None
    base = replace(base, verified=known.at.strftime(_TIME) if known.at else "")
    plan = from_jobs(service, observed, settings, now, base, fetches, mends)
    mending = plan.finding
    if mends is not None and plan.resolved is not None and _broken_cache(service, observed, latest) is None:
        # The pods that serve have read it before: only who would read it now waits until it is mended.
        plan = replace(plan, model=plan.resolved, finding=None)
    if rot is not None and plan.model is not None:
        found = rot_finding(service, known, mending)
        said = Condition("CacheVerified", "False", found.reason, found.message)
        plan = replace(plan, rot=found, verification=said)
    uid = _volume_uid(observed, base)
    scheduled = plan_verification(service, observed, settings, plan.model, uid, known, now)
    return replace(
        plan,
        actions=(*plan.actions, *scheduled.actions),
        verification=plan.verification or scheduled.condition,
        verify_after=scheduled.due_seconds,
    )


def from_jobs(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    now: datetime,
    base: CachePlan,
    jobs: list[Object],
    rot: FetchFailure | None,
) -> CachePlan:
    """What the prefetch Jobs of one source say and what follows. `rot` is to be mended as what a pod found is.

    Of `base` the claim, the source and where the spec names it are given.
    """
    earlier = earlier_attempt(service, base.source)
    latest = jobs[-1] if jobs else None
    attempt = max(earlier, attempt_of(latest) if latest else 0)
    stale = [action for job in jobs[:-1] for action in delete(job, "a newer attempt replaced it")]
    base = replace(base, attempt=attempt, actions=(*base.actions, *stale))
    known = _known_model(service, observed, base.source, latest)
    broken = _broken_cache(service, observed, latest)
    base = replace(base, resolved=known)
    if known is not None and broken is None and rot is None and (latest is None or is_finished(latest)):
        return replace(base, model=known)  # nearly always, and nobody asks what the Job was made with
    changed = _changed(service, settings, _volume_uid(observed, base), latest) if latest is not None else ""
    if latest is not None and not is_finished(latest):
        if not changed:
            return _while_running(observed, base, latest, known, now)
        base = replace(base, actions=(*base.actions, *delete(latest, f"it runs with another {changed}")))
    elif latest is not None and not changed and tells_later(observed, latest):
        return _while_running(observed, base, latest, known, now)
    failed_at = condition_time(latest, "Failed") if latest else None
    if latest is not None and failed_at is not None and not changed:
        delay = timedelta(seconds=min(FIRST_DELAY_SECONDS * 2 ** (attempt - 1), LONGEST_DELAY_SECONDS))
        # An API server whose clock is behind ours must not have us try without a pause.
        due = max(failed_at, begun_at(latest) or failed_at) + delay
        if now < due:
            return _waiting(service, observed, base, latest, due, now)
    if changed and latest is not None:
        why = f"the spec or the chart asks for another {changed} than Job {latest['metadata']['name']} had"
    else:
        why = _why_fetch(service, latest, broken or rot, failed_at is not None)
    repair = (
        broken is not None or rot is not None or (latest is not None and not is_finished(latest) and is_repair(latest))
    )
    job = prefetch_job(service, settings, _volume_uid(observed, base), attempt + 1, repair=repair, begun=now)
    finding = Finding("CacheCorrupt" if repair else "Fetching", sentence(f"Starting a prefetch Job: {why}"))
    return replace(
        base,
        attempt=attempt + 1,
        actions=(*base.actions, *ensure(None, job, why)),
        finding=finding,
        resolved=known,
        requeue_after=POLL_SECONDS,
    )


def _changed(service: InferenceService, settings: Settings, volume_uid: str, job: Object) -> str:
    """What of a Job's pods is not what they would be made with now; "" = nothing."""
    wanted = prefetch_job(service, settings, volume_uid, attempt_of(job), repair=is_repair(job))
    asked = wanted["spec"]["template"]["spec"]
    made_with, another = live_template_key(job), first_difference(job["spec"]["template"]["spec"], asked, "")
    if made_with in ("", template_key(asked)):
        return another if not made_with else ""
    return another or "pod"


def _while_running(
    observed: Observed, base: CachePlan, job: Object, known: FetchedModel | None, now: datetime
) -> CachePlan:
    """A prefetch runs: what it says of itself, or what keeps its pod from running."""
    pods, repairs = pods_of(observed, job), is_repair(job)
    reason = "CacheCorrupt" if repairs else "Fetching"
    running = replace(base, resolved=known, requeue_after=_poll(observed))
    trouble = first_trouble(
        pod for pod in pods if pod.get("status", {}).get("phase") in ("Pending", "Unknown", None, "")
    )
    made = time_of(str(job["metadata"].get("creationTimestamp", "")))
    young = made is not None and now - made < timedelta(seconds=PLACING_SECONDS)
    if trouble and not (young and trouble.reason == "Unschedulable"):
        return replace(running, finding=Finding(trouble.reason, trouble.message, trouble.permanent))
    name = job["metadata"]["name"]
    if not pods and made is not None and not young and not job["spec"].get("suspend"):
        text = f"Job {name} has no pod: a ResourceQuota, a LimitRange or an admission webhook keeps it from being made"
        return replace(running, finding=Finding("PodRefused", f"{text}. More: kubectl describe job {name}."))
    outcome, progress = fetch_outcome(pods), observed.progress
    # Until the next try knows what there is to fetch, the one before is the news.
    if isinstance(outcome, FetchFailure) and not (progress and progress.bytes_total):
        return replace(running, finding=_failed_try(name, outcome, reason))
    what = f"Job {name} fetches again what changed in the cache" if repairs else f"Job {name}"
    if progress is None:
        text = f"{what}; it is starting." if repairs else f"{what} is starting."
        return replace(running, finding=Finding(reason, text))
    text = f"{what}: {progress.phase}"
    if progress.bytes_total:
        text += f", {human_bytes(progress.bytes_done)} of {human_bytes(progress.bytes_total)}"
    if progress.eta_seconds:
        text += f", about {progress.eta_seconds} s to go"
    return replace(running, finding=Finding(reason, sentence(text)))


def _failed_try(job: str, failure: FetchFailure, reason: str) -> Finding:
    """A pod of a Job failed, and the Job is not over."""
    if failure.reason in PERMANENT:  # its controller is about to end it
        return Finding(reason, f"Job {job} gives up: {sentence(failure.message)}")
    text = f"{sentence(failure.message)} Job {job} tries again by itself."
    return Finding(reason if reason == "CacheCorrupt" else failure.reason, text)


def _poll(observed: Observed) -> float:
    """Seconds until progress is looked at again: often near the end, rarely in a long download. A pod that is not there
    yet, or ends, makes an event of its own.
    """
    progress = observed.progress
    if progress is None:
        return STARTING_SECONDS
    return min(max(progress.eta_seconds / 20, POLL_SECONDS), SLOWEST_POLL_SECONDS)


def _waiting(
    service: InferenceService, observed: Observed, base: CachePlan, job: Object, due: datetime, now: datetime
) -> CachePlan:
    """A prefetch failed and the next one is not due yet."""
    name = job["metadata"]["name"]
    outcome = fetch_outcome(pods_of(observed, job))
    failure = outcome if isinstance(outcome, FetchFailure) else None
    failure = failure or FetchFailure("FetchFailed", f"Job {name} failed and its pods left no report")
    advice = fetch_advice(service, failure.reason)
    text = (
        f"{sentence(failure.message)} {advice.format(claim=base.claim, where=base.where)}".strip()
        + f" Next try at {due:%H:%M:%S} UTC; to try now: kubectl delete job {name}"
    )
    return replace(
        base,
        finding=Finding(failure.reason, sentence(text), failure.reason in PERMANENT),
        requeue_after=max((due - now).total_seconds(), 1.0),
        exact=True,
    )


def _why_fetch(service: InferenceService, latest: Object | None, broken: FetchFailure | None, failed: bool) -> str:
    if broken:
        return f"the cache is not what was published ({broken.reason}: {broken.message.rstrip('.')})"
    if failed:
        return "the attempt before failed"
    if latest is not None:
        return "the report of the attempt before is lost"
    if service.in_place:
        return f"{service.model.uri} is served where it lies and was not hashed yet"
    at = f" at {service.model.revision}" if service.model.scheme in HUBS else ""  # others have no revisions
    without = "was not looked up yet" if service.cache.mode == "Image" else "was not fetched yet"
    where = "is not on the volume yet" if service.cache.has_volume else without
    return f"{service.model.uri}{at} {where}"


def _known_model(
    service: InferenceService, observed: Observed, source: str, latest: Object | None
) -> FetchedModel | None:
    """The published model: as the latest complete Job reports it, else as the status remembers it."""
    if latest is not None and condition_time(latest, "Complete") is not None:
        outcome = fetch_outcome(pods_of(observed, latest))
        if isinstance(outcome, FetchedModel):
            return outcome
    if (service.status.get("model") or {}).get("source") == source:
        return remembered_model(service.status)
    return None


def _broken_cache(service: InferenceService, observed: Observed, latest: Object | None) -> FetchFailure | None:
    """What a verifying init container found after the model was last published. What one node or pod has wrong is
    mended there (nodes.py).
    """
    if not service.cache.has_volume:
        return None
    found = verify_failure(observed.serving_pods)
    if found is None:
        return None
    failure, when = found
    published = [condition_time(latest, "Complete") if latest else None]
    for condition in service.status.get("conditions") or ():
        if condition["type"] == "ModelCached" and condition["status"] == "True":
            published.append(time_of(condition["lastTransitionTime"]))
    at = time_of(when)
    return failure if at and all(time is None or at > time for time in published) else None


def _volume_uid(observed: Observed, base: CachePlan) -> str:
    """What stands for the volume in the names of Jobs and sources."""
    if base.mode in _NO_VOLUME:
        return base.mode
    return str(observed.children["PersistentVolumeClaim", base.claim]["metadata"]["uid"])
