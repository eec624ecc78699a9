"""Plans the copies on nodes' own disks (cache.mode: Node): which nodes need one, and the Jobs that bring it.

A pod's claim waits until its node has the copy: the node cache agent of that node says so by serving it. What waits is
brought by a Job at that node, and so is what spec.cache.prewarm asks for.
Invariants: pure. One Job a node at a time; one that failed is followed by another after a delay that doubles; a node
for which nothing waits any more is left alone.
Knows nothing of how an agent keeps a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from stoker_operator.manifests import copies
from stoker_operator.manifests.fetching.fill import fill_job, is_fill, node_of
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.manifests.pod import placement
from stoker_operator.observe.capacity import allocatable_gpus, candidates
from stoker_operator.observe.rollout import is_pending
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Finding, ensure
from stoker_operator.plan.diagnose import fetch_outcome, first_trouble, verify_failure
from stoker_operator.plan.jobs import attempt_of, begun_at, condition_time, delete, is_finished, pods_of, time_of
from stoker_operator.plan.wording import counted, sentence
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, FetchFailure, InferenceService

Object = Mapping[str, Any]
FIRST_DELAY_SECONDS = 30
LONGEST_DELAY_SECONDS = 600
# An agent that has not served a copy so long after a Job brought it, or a pod asked for it, has given it up meanwhile.
SERVED_SECONDS = 60
LOOK_SECONDS = 60.0
# Nodes that are filled at a time before anybody waits for them.
PREWARMED_AT_ONCE = 4
_REPAIR = "repair"


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """What to do about nodes. `copies`: how many have one, None = nobody tells; `finding`: what pods wait for."""

    actions: tuple[Action, ...] = ()
    finding: Finding | None = None
    copies: int | None = None
    requeue_after: float | None = None


def plan_nodes(
    service: InferenceService, observed: Observed, settings: Settings, model: FetchedModel | None, now: datetime
) -> NodesPlan:
    """Decide for every node; nothing where copies are not kept on nodes."""
    if service.cache.mode != "Node":
        return NodesPlan()
    if model is None:
        return NodesPlan(finding=_full(service, observed))
    jobs = [job for job in observed.jobs if is_fill(job)]
    draft = _Draft(service, observed, settings, model, now)
    waiting = _waiting(service, observed, model) | _broken(observed, model, jobs)
    have = _having(service, observed, model)
    there = (have or frozenset()) | _fetched(observed, model, now)
    cold = _cold(service, observed, there, waiting)
    for node in (*waiting, *cold):
        asked = _asked_since(service, observed, model, node) if node in there else None
        lent = asked + timedelta(seconds=SERVED_SECONDS) if asked is not None else now
        if waiting.get(node) != _REPAIR and now < lent:
            draft.expect(node, lent)
            continue
        mine = sorted((job for job in jobs if _for(job, node, model)), key=attempt_of)
        draft.fill(node, mine, waiting.get(node, ""))
    for job in jobs:
        if node_of(job) not in {*waiting, *cold} and not is_finished(job):
            draft.actions += delete(job, "nothing waits for it any more")
    due = [*draft.due, *([LOOK_SECONDS] if service.cache.prewarm else [])]
    return NodesPlan(
        tuple(draft.actions),
        _full(service, observed) or next(iter(sorted(draft.words, key=lambda word: not word.stalled)), None),
        len(have) if have is not None else None,
        min(due, default=None),
    )


@dataclass(slots=True)
class _Draft:
    """A plan that grows node by node."""

    service: InferenceService
    observed: Observed
    settings: Settings
    model: FetchedModel
    now: datetime
    actions: list[Action] = field(default_factory=list)
    words: list[Finding] = field(default_factory=list)
    due: list[float] = field(default_factory=list)

    def fill(self, node: str, jobs: list[Object], claim: str) -> None:
        """Bring the copy to one node: begin, wait, or begin again. `claim`: what waits for it, "" = nothing yet."""
        latest = jobs[-1] if jobs else None
        self.actions += [action for job in jobs[:-1] for action in delete(job, "a newer attempt replaced it")]
        if latest is not None and not is_finished(latest):
            self.words += [_running(self.observed, latest, node)] if claim else []
            return
        due = self._due(latest, repair=claim == _REPAIR)
        if latest is not None and self.now < due:
            self.due.append(max((due - self.now).total_seconds(), 1.0))
            self.words += [_between(self.observed, latest, node, due)] if claim else []
            return
        self._begin(node, attempt_of(latest) + 1 if latest is not None else 1, claim)

    def expect(self, node: str, due: datetime) -> None:
        """A pod has just come to a node that has the copy: its agent serves it in a moment; if not, a Job looks."""
        self.due.append(max((due - self.now).total_seconds(), 1.0))
        self.words.append(Finding("FillingNode", f"Node {node} has the copy, and is about to lend it to its pod."))

    def _due(self, latest: Object | None, *, repair: bool) -> datetime:
        """When the next Job of a node may begin."""
        failed = condition_time(latest, "Failed") if latest is not None else None
        ended = condition_time(latest, "Complete") if latest is not None else None
        if latest is not None and failed is not None:
            wait = min(FIRST_DELAY_SECONDS * 2 ** (attempt_of(latest) - 1), LONGEST_DELAY_SECONDS)
            return max(failed, begun_at(latest) or failed) + timedelta(seconds=wait)
        return self.now if ended is None or repair else ended + timedelta(seconds=SERVED_SECONDS)

    def _begin(self, node: str, attempt: int, claim: str) -> None:
        repair = claim == _REPAIR
        why = f"node {node} has no copy of {self.service.model.uri}" + (", and a pod waits for it" if claim else "")
        why = f"a pod found that the copy on node {node} is not what was published" if repair else why
        job = fill_job(self.service, self.settings, self.model, node, attempt, self.now, repair=repair)
        self.actions += ensure(None, job, why)
        if claim:
            self.words.append(Finding("FillingNode", f"Job {job['metadata']['name']} begins: {sentence(why)}"))


def _waiting(service: InferenceService, observed: Observed, model: FetchedModel) -> dict[str, str]:
    """The nodes on which pods wait for a copy, with the pods' claims."""
    found: dict[str, str] = {}
    for claim in _claims(service, observed, copies.READER):
        notes = claim["metadata"].get("annotations") or {}
        if _is_of(notes, model):
            found.setdefault(notes[copies.SELECTED_NODE], str(claim["metadata"]["name"]))
    return dict(sorted(found.items()))


def _asked_since(service: InferenceService, observed: Observed, model: FetchedModel, node: str) -> datetime | None:
    """Since when a pod waits for a node's copy; None where none does, or nobody knows."""
    found = [
        time_of(str(claim["metadata"].get("creationTimestamp", "")))
        for claim in _claims(service, observed, copies.READER)
        if _is_of(notes := claim["metadata"].get("annotations") or {}, model) and notes[copies.SELECTED_NODE] == node
    ]
    return min((since for since in found if since is not None), default=None)


def _fetched(observed: Observed, model: FetchedModel, now: datetime) -> frozenset[str]:
    """The nodes on which the first Job, which is bound to none, has just brought the copy: no label tells of it yet."""
    found = set()
    for job in observed.jobs:
        ended = condition_time(job, "Complete")
        if ended is None or is_fill(job) or now > ended + timedelta(seconds=SERVED_SECONDS):
            continue
        for pod in pods_of(observed, job):
            outcome = fetch_outcome([pod])
            if isinstance(outcome, FetchedModel) and outcome.digest == model.digest:
                found.add(str(pod.get("spec", {}).get("nodeName", "")))
    return frozenset(found)


def _claims(service: InferenceService, observed: Observed, component: str) -> list[Object]:
    """The claims of this service's pods that no agent has served."""
    return [claim for claim in _asked(service, observed, component) if not _is_served(claim)]


def _asked(service: InferenceService, observed: Observed, component: str) -> list[Object]:
    """The claims of this service's pods."""
    return [
        claim
        for claim in observed.claims
        if (claim["metadata"].get("labels") or {}).get(COMPONENT) == component
        and claim["metadata"]["labels"].get(INSTANCE) == service.name
        and "deletionTimestamp" not in claim["metadata"]
    ]


def _is_served(claim: Object) -> bool:
    return bool((claim.get("spec") or {}).get("volumeName"))


def _broken(observed: Observed, model: FetchedModel, jobs: list[Object]) -> dict[str, str]:
    """The nodes whose copy is not what was published, as a pod found after it was last brought; with "repair"."""
    found: dict[str, str] = {}
    for pod in observed.serving_pods:
        failure, node = verify_failure([pod]), str(pod.get("spec", {}).get("nodeName", ""))
        at = time_of(failure[1]) if failure is not None else None
        ends = [condition_time(job, "Complete") for job in jobs if _for(job, node, model)]
        if node and at is not None and all(end is None or at > end for end in ends):
            found[node] = _REPAIR
    return found


def _having(service: InferenceService, observed: Observed, model: FetchedModel) -> frozenset[str] | None:
    """The nodes that have the copy, as their agents label them and serve claims; None where nobody tells of nodes.

    Labels come a moment after the claim of the first pod is served, and no watch tells of them; an agent serves a
    reader's claim only where the copy is whole, and keeps it for as long as the claim is there.
    """
    if observed.nodes is None:
        return None
    label = copies.copy_label(service.namespace, model.digest)
    labelled = {
        str(node["metadata"]["name"]) for node in observed.nodes if label in (node["metadata"].get("labels") or {})
    }
    asked = [claim["metadata"] for claim in _asked(service, observed, copies.READER) if _is_served(claim)]
    notes = [meta.get("annotations") or {} for meta in asked]
    return frozenset(labelled | {str(note[copies.SELECTED_NODE]) for note in notes if _is_of(note, model)})


def _is_of(notes: Mapping[str, Any], model: FetchedModel) -> bool:
    """Whether a pod's claim is for the copy that a node has of this model."""
    return notes.get(copies.DIGEST) == model.digest and bool(notes.get(copies.SELECTED_NODE))


def _cold(service: InferenceService, observed: Observed, have: frozenset[str], waiting: Mapping[str, str]) -> list[str]:
    """The nodes that are to have a copy before a pod comes to them, so many as are filled at a time."""
    if not service.cache.prewarm or service.suspend:
        return []
    wanted, spec = service.resources, placement(service)
    fitting = [
        str(node["metadata"]["name"])
        for node in observed.nodes or ()
        if copies.SERVED in (node["metadata"].get("labels") or {})
        and candidates(spec, [node])
        and (not wanted.gpus or allocatable_gpus(node, wanted.gpu_resource) >= wanted.gpus)
    ]
    # What a Job brought is there, although the nodes were last looked at before.
    brought = {node_of(job) for job in observed.jobs if is_fill(job) and condition_time(job, "Complete") is not None}
    return sorted(set(fitting) - have - brought - waiting.keys())[:PREWARMED_AT_ONCE]


def _running(observed: Observed, job: Object, node: str) -> Finding:
    """What is to be said of a node that is being filled, while a pod waits for it."""
    name, pods = job["metadata"]["name"], _pods(observed, job)
    trouble = first_trouble(filter(is_pending, pods))
    if trouble is not None:
        return Finding(trouble.reason, f"Node {node} is to get its copy first. {trouble.message}", trouble.permanent)
    outcome = fetch_outcome(pods)
    if isinstance(outcome, FetchFailure):
        text = f"Node {node} is to get its copy first: {sentence(outcome.message)} Job {name} tries again by itself."
        return Finding(outcome.reason, text)
    return Finding("FillingNode", f"Node {node} gets its copy first, by Job {name}; then its pod starts.")


def _between(observed: Observed, job: Object, node: str, due: datetime) -> Finding:
    """What is to be said between two Jobs of a node."""
    name = job["metadata"]["name"]
    if condition_time(job, "Failed") is None:
        return Finding("FillingNode", f"Job {name} brought the copy to node {node}; its pod starts.")
    outcome = fetch_outcome(_pods(observed, job))
    failure = outcome if isinstance(outcome, FetchFailure) else None
    failure = failure or FetchFailure("FetchFailed", f"Job {name} failed and its pods left no report")
    text = f"Node {node} has no copy: {sentence(failure.message)} "
    text += f"Next try at {due:%H:%M:%S} UTC; to try now: kubectl delete job {name}."
    return Finding(failure.reason, text)


def _full(service: InferenceService, observed: Observed) -> Finding | None:
    """What the agents say of nodes that have no room."""
    said = []
    for component in (copies.READER, copies.FILLER):
        for claim in _claims(service, observed, component):
            words = (claim["metadata"].get("annotations") or {}).get(copies.FULL)
            said += [str(words)] if words else []
    if not said:
        return None
    more = f" So on {counted(len(set(said)) - 1, 'other node')}." if len(set(said)) > 1 else ""
    return Finding("NodeFull", f"{sentence(sorted(said)[0])}{more}")


def _for(job: Object, node: str, model: FetchedModel) -> bool:
    digest = (job["metadata"].get("annotations") or {}).get(copies.DIGEST)
    return is_fill(job) and node_of(job) == node and digest == model.digest


def _pods(observed: Observed, job: Object) -> list[Object]:
    """The pods of a Job."""
    uid = job["metadata"].get("uid")
    return [
        pod
        for pod in observed.fill_pods
        if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())
    ]
