"""Plans what becomes of a new commit: it is fetched while the old one serves, then takes its place as a change of the
spec would.

Invariants: pure. What serves is touched by nothing but a commit that is published, verified and fits; a source that
cannot be asked, or a commit that cannot be fetched, is said in the condition Following and nowhere else. A commit takes
the place of another one between rollouts, never during one.
Knows nothing of pods: how a change reaches them, and the way back, are plan/rollout.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from stoker_operator.manifests import claim_name
from stoker_operator.manifests.revision import read_record
from stoker_operator.observe.gpu import Gpu
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Finding
from stoker_operator.plan.cache import CachePlan, plan_cache
from stoker_operator.plan.conditions import STAGES
from stoker_operator.plan.fit import assess
from stoker_operator.plan.follow.lookups import Looked, plan_lookups
from stoker_operator.plan.jobs import time_of
from stoker_operator.plan.pace import sooner
from stoker_operator.plan.retention import mounted_claims
from stoker_operator.plan.wording import sentence
from stoker_operator.settings import Settings
from stoker_operator.spec.follow import Followed
from stoker_operator.spec.service import InferenceService

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_ROLLING = ("RollingOut", "PodsStarting", "PodsStopping", "AwaitingAnswer", "WaitingForIdle")


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The service at the commit that it is to serve, with the cache of that; `lead` is the cache of a commit on its
    way. `status` is what is to be remembered, {} = nothing; `again` seconds until a look, None = an event tells.
    `failed`: the commit was rolled out and given up.
    """

    service: InferenceService
    cache: CachePlan
    lead: CachePlan | None = None
    actions: tuple[Action, ...] = ()
    condition: Condition | None = None
    status: dict[str, Any] = field(default_factory=dict)
    again: float | None = None
    failed: bool = False

    def given_up(self, failed: str, observed: Observed) -> FollowPlan:
        """The same, where the rollout gave up revision `failed` ("" = none), and it was the commit that was new in it:
        no revision that served has it.
        """
        commit = self.service.followed.commit
        served = [record for record in map(read_record, observed.revisions) if record.served]
        if not failed or not commit or any(_mounts(self.service, record.template["spec"]) for record in served):
            return self
        if self.lead is not None or self.condition is None:
            return replace(self, failed=True)
        text = f"Commit {commit} was given up as revision {failed}; the next one is tried when it comes."
        return replace(self, failed=True, condition=Condition("Following", "False", "GivenUp", text))


def plan_follow(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    cache: CachePlan,
    gpu: Gpu | None,
    now: datetime,
) -> FollowPlan:
    """Decide which commit is served, and which is fetched."""
    known, memory = cache.model or cache.resolved, service.followed
    active = service.model.update_policy == "Follow" and not service.suspend
    lead = _lead(service, observed, settings, memory.found, now) if active else None
    busy = lead is not None and lead.model is None and lead.attempt <= 1 and _on_its_way(lead.finding)
    begun = known is not None or memory.commit != ""
    looked = plan_lookups(service, observed, settings, now, may_look=begun and not busy)
    plan = FollowPlan(service, cache, None, looked.actions, again=looked.due_seconds)
    if not active:
        return _resting(plan)
    current = known.resolved_revision if known is not None else memory.commit
    memory = _remembered(service, looked, current)
    if cache.model is not None and not memory.since:
        memory = replace(memory, since=now.strftime(_TIME))
    if memory.found != service.followed.found:
        lead = _lead(service, observed, settings, memory.found, now)
    if lead is None:
        return _said(replace(plan, service=replace(service, followed=memory)), looked, current)
    fit = assess(service, lead.model, gpu) if lead.model is not None else None
    too_large = fit is not None and fit.blocks and service.resources.fit_check == "Enforce"
    if lead.model is None or too_large or _rolls(service):
        held = Finding("DoesNotFit", fit.message) if fit is not None and too_large else lead.finding
        actions = (*plan.actions, *(each for each in lead.actions if each not in cache.actions))
        plan = replace(plan, service=replace(service, followed=memory), lead=lead, actions=actions)
        plan = replace(plan, again=sooner(plan.again, lead.requeue_after))
        return replace(_said(plan, looked, current), condition=_coming(service, memory.found, current, held))
    memory = replace(memory, commit=memory.found, since=now.strftime(_TIME), found="")
    actions = (*cache.actions, *(each for each in lead.actions if each not in cache.actions))
    adopted = replace(service.at(memory.commit), followed=memory)
    plan = replace(plan, service=adopted, cache=replace(lead, actions=actions))
    return _said(plan, looked, memory.commit)


def _mounts(service: InferenceService, pod: Mapping[str, Any]) -> bool:
    """Whether pods of this spec have the weights of the service's commit."""
    if service.cache.mode != "Image":
        return claim_name(service) in mounted_claims(pod)
    references = [str((volume.get("image") or {}).get("reference", "")) for volume in pod.get("volumes") or ()]
    return any(reference.endswith(f"@{service.followed.commit}") for reference in references)


def _lead(
    service: InferenceService, observed: Observed, settings: Settings, found: str, now: datetime
) -> CachePlan | None:
    """The cache of a commit that is to come; what pods found wrong with theirs says nothing of it."""
    if not found:
        return None
    return plan_cache(service.at(found), replace(observed, engine_pods=(), worker_pods=()), settings, now)


def _on_its_way(finding: Finding | None) -> bool:
    return finding is None or finding.reason in STAGES


def _remembered(service: InferenceService, looked: Looked, current: str) -> Followed:
    """What is known after the last look-up; `current` is the commit that is served, or that ought to be."""
    memory = service.followed
    if looked.at is None or not looked.commit:
        return memory
    at = looked.at.strftime(_TIME)
    memory = replace(memory, checked=max(memory.checked, at))
    if looked.commit == current:
        return replace(memory, found="", seen="", seen_at="")
    if not service.model.in_store or looked.commit == memory.found:
        return replace(memory, found=looked.commit)
    # Files are written to a store one after the other: a state counts once it has stayed for an interval.
    before = time_of(memory.seen_at)
    if memory.seen == looked.commit and before is not None and before < looked.at:
        return replace(memory, found=looked.commit)
    return memory if memory.seen == looked.commit else replace(memory, seen=looked.commit, seen_at=at)


def _rolls(service: InferenceService) -> bool:
    """Whether a change is on its way to the pods, and has no trouble yet."""
    ready = [item for item in service.status.get("conditions") or () if item["type"] == "Ready"]
    return any(item["status"] != "True" and item["reason"] in _ROLLING for item in ready)


def _resting(plan: FollowPlan) -> FollowPlan:
    """Nobody looks: what is served is remembered, so that it stays."""
    memory, model = plan.service.followed, plan.service.model
    status = {"source": model.follows, "revision": model.asked, "commit": memory.commit, "since": memory.since}
    follows = model.update_policy == "Follow"
    if follows and memory.found:
        status["found"] = memory.found
    text = "spec.suspend is true: nobody looks for a new commit."
    said = Condition("Following", "Unknown", "Suspended", text) if follows else None
    kept = {key: value for key, value in status.items() if value} if memory.commit or follows else {}
    return replace(plan, status=kept, condition=said)


def _said(plan: FollowPlan, looked: Looked, current: str) -> FollowPlan:
    """With what is to be remembered, and with the condition of a commit that is served."""
    memory, model = plan.service.followed, plan.service.model
    status = {
        "source": model.follows, "revision": model.asked, "commit": memory.commit, "since": memory.since,
        "found": memory.found, "seen": memory.seen, "seenTime": memory.seen_at, "checked": memory.checked,
    }  # fmt: skip
    what = f"{model.asked} of {model.uri}" if model.scheme == "hf" else model.uri
    if looked.failure is not None:
        text = f"{what} could not be looked up: {sentence(looked.failure.message)} What serves is not touched by that."
        said = Condition("Following", "False", looked.failure.reason, text)
    elif not current:
        said = Condition("Following", "Unknown", "NotYet", f"{what} is looked up again once it was fetched.")
    else:
        said = Condition("Following", "True", "UpToDate", f"{what} stands for {current}.")
    return replace(plan, status={key: value for key, value in status.items() if value}, condition=said)


def _coming(service: InferenceService, found: str, current: str, finding: Finding | None) -> Condition:
    """Following, while a new commit is fetched or cannot be."""
    serves = f"{current} serves meanwhile." if current else ""
    if _on_its_way(finding):
        how = sentence(finding.message) if finding is not None else "It waits until the rollout under way is over."
        text = f"{service.model.asked} stands for {found} now. {how} {serves}".strip()
        return Condition("Following", "True", "NewCommit", text)
    assert finding is not None
    text = f"The new commit {found} cannot be served: {sentence(finding.message)} {serves}".strip()
    return Condition("Following", "False", finding.reason, text)
