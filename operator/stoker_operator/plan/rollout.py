"""Plans the workload, a Deployment or a LeaderWorkerSet: its revision, how a change of it goes about the GPUs, and the
way back from one that fails.

Invariants: pure. A revision is known by its pod template; the record of it (a ControllerRevision) says whether it ever
served or was given up. Only a revision that never served is given up, and only for one that did: when its time is over,
or earlier where nothing serves any more and nothing but a person's change would let it run.
While there is nothing newer to roll out yet, the number of pods is followed all the same.
Knows nothing of the cache and of who sets the number of pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.revision import Record, read_record
from stoker_operator.observe.rollout import Rollout, template_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Delete, Finding, ensure
from stoker_operator.plan.diagnose import first_trouble
from stoker_operator.plan.groups.around import lacks_kind
from stoker_operator.plan.groups.restarts import Group, is_late
from stoker_operator.plan.placing import IN_PLACE, asks_room, strategy
from stoker_operator.plan.scaling import sets_replicas, wanted_replicas
from stoker_operator.plan.turn import cause, is_default, waiting_words, waits
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Object = Mapping[str, Any]
KEPT_RECORDS = 5
HOPELESS_AFTER = timedelta(seconds=90)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What to do for the workload. `finding` is why its newest revision is not the one that runs, if it is not.

    `reached`: the generation's own template, or the one it goes back to, is the workload's with this plan, and `target`
    that workload, (kind, name).
    `waits` says what does not reach it yet, though nobody asked this service for it.
    `asks_room`: the specs of a replica's pods, of which it would change the plan where they could go; nobody looked.
    """

    workload: tuple[Action, ...] = ()
    records: tuple[Action, ...] = ()
    finding: Finding | None = None
    previous: str = ""
    failed: str = ""
    asks_room: Sequence[Object] | None = None
    asks_load: bool = False
    asks_turn: bool = False
    waiting_since: str = ""
    waits: str = ""
    reached: bool = False
    target: tuple[str, str] | None = None


def plan_held(service: InferenceService, observed: Observed, no_pods: bool | None = None) -> RolloutPlan:
    """What to do while the model that the spec asks for is not there (or may not run): what runs stays, in the number
    that the spec asks for, so that `suspend`, a resumption and `replicas` never wait for a download.
    """
    records = sorted(map(read_record, observed.revisions), key=lambda record: record.number)
    current = observed.rollout.current
    held = RolloutPlan(previous=next((r.hash for r in reversed(records) if r.served and r.hash != current), ""))
    live = observed.workload(service)
    if live is None or "deletionTimestamp" in live["metadata"]:
        return held
    wanted = wanted_replicas(service, live, no_pods)
    # Nobody's wish any more while we still hold the field, as after a suspension: it is let go.
    unchanged = not sets_replicas(live) if wanted is None else wanted == live["spec"].get("replicas", 1)
    if unchanged:
        return held
    key = manifests.live_template_key(live)
    template = next((record.template for record in records if record.key == key), None)
    variant = manifests.Variant(wanted, *IN_PLACE, template)
    unit = observed.rollout.unit
    count = f"{unit}s are" if wanted is None else f"{wanted} {unit}s are"
    why = f"{count} asked for; the revision stays until the next one can run"
    return replace(held, workload=(Apply(manifests.held_workload(service, live, variant), why, create=False),))


def plan_rollout(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    model: FetchedModel,
    now: datetime,
    no_pods: bool | None = None,
    groups: Sequence[Group] = (),
) -> RolloutPlan:
    """Decide on the workload, given its model. `no_pods`: whether the service is to sleep, None = it never does;
    `groups` are those there are.
    """
    records = sorted(map(read_record, observed.revisions), key=lambda record: record.number)
    wanted = manifests.revision_template(service, settings, model)
    key = manifests.template_key(wanted)
    late = is_late(groups, key, manifests.group_progress_seconds(service, settings, model), now)
    failed = _given_up(service, observed, records, key, now, late=late)
    good = next((record for record in reversed(records) if record.served and record.key != key), None)
    back = good if failed is not None and service.rollout.auto_rollback else None
    template = back.template if back is not None else wanted
    target = manifests.workload_key(service, template)
    live = observed.children.get(target)
    running = live if live is not None else observed.workload(service)
    changes = running is not None and manifests.live_template_key(running) != manifests.template_key(template)
    lacking = lacks_kind(observed) if manifests.is_group(template) else None
    if lacking is not None:
        return replace(plan_held(service, observed, no_pods), finding=lacking)
    if changes and back is None:
        waiting = _wait_for_idle(service, observed, now, no_pods)
        if waiting is not None:
            return waiting
        if running is not None and waits(service, observed):
            words = waiting_words(observed, cause(service, running, settings))
            held = plan_held(service, observed, no_pods)
            return replace(held, waits=words, asks_turn=observed.turn is None)
        if service.rollout.paused and (live is None or manifests.is_group(template)):
            # A Deployment has a pause of its own.
            held = plan_held(service, observed, no_pods)
            return replace(held, finding=_finding(service, observed, records, key, None, None))
    surge, unavailable = strategy(service, observed, live, changes, template)
    variant = manifests.Variant(wanted_replicas(service, live, no_pods), surge, unavailable, template)
    manifest = manifests.workload_manifest(service, settings, model, variant)
    workload = tuple(ensure(live, manifest, _why(model, back)))
    if changes and back is None and live is not None and is_default(service):
        workload = tuple(replace(action, reason=cause(service, live, settings)) for action in workload)
    kept = _records(service, observed, records, template, settled_on=not workload, failed=failed if back else None)
    current = observed.rollout.current
    return RolloutPlan(
        workload=workload,
        records=tuple(kept),
        finding=_finding(service, observed, records, key, failed, back),
        previous=next((r.hash for r in reversed(records) if r.served and r.hash != current), ""),
        failed=failed.hash if failed is not None and back is not None else "",
        asks_room=asks_room(service, observed, changes, template),
        reached=True,
        target=target,
    )


def _wait_for_idle(
    service: InferenceService, observed: Observed, now: datetime, no_pods: bool | None
) -> RolloutPlan | None:
    """The plan while a change waits for a moment without requests; None when it need not wait any longer."""
    longest = service.rollout.wait_for_idle
    if not longest or service.suspend or service.rollout.paused or not observed.rollout.ready or observed.load == 0:
        return None
    since = str((service.status.get("revisions") or {}).get("waitingSince") or now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    until = datetime.fromisoformat(since) + timedelta(seconds=longest)
    if now >= until:
        return None
    text = f"A change waits until the pods have no request, at most until {until:%H:%M:%S} UTC"
    finding = Finding("WaitingForIdle", f"{text}; they have {observed.load} now." if observed.load else f"{text}.")
    held = plan_held(service, observed, no_pods)
    return replace(held, finding=finding, asks_load=observed.load is None, waiting_since=since)


def first_variant(service: InferenceService) -> manifests.Variant:
    """What a workload is made with when there is none yet."""
    return manifests.Variant(wanted_replicas(service, None), *strategy(service, Observed(), None, False, {}))


def _why(model: FetchedModel, back: Record | None) -> str:
    if back is not None:
        return f"back to revision {back.hash}, since the newest never became ready"
    return f"revision {model.resolved_revision} is published and verified"


def _given_up(
    service: InferenceService, observed: Observed, records: list[Record], key: str, now: datetime, *, late: bool
) -> Record | None:
    """The record of the wanted template if that failed earlier, or fails now: no pod of it ever became ready in time.
    `late`: its groups were not; of a Deployment its own controller says so.

    Raised to life again by nobody but a person: see the finding's message.
    """
    known = next((record for record in records if record.key == key and record.failed), None)
    if known is not None:
        return known
    state = observed.rollout
    if service.suspend or not state.desired:
        return None  # no pod is asked for, so none is late
    current = next((record for record in records if record.hash == state.current and record.key == key), None)
    if current is None or current.served:
        return None
    pods = [pod for pod in observed.serving_pods if template_hash(pod) == state.current]
    trouble = first_trouble(pods)
    # It went in place, and cannot run: the one that served comes back without waiting for the deadline.
    hopeless = trouble is not None and trouble.permanent and not state.ready and old_enough(pods, now)
    if not state.deadline_exceeded and not late and not hopeless:
        return None
    return current.failing(trouble.said if trouble is not None else state.failed)


def _number(records: list[Record], state: Rollout, known: Record | None) -> int:
    """The current revision's number, above all others': a Deployment counts its own, a LeaderWorkerSet none, and
    neither goes on where the other ended.
    """
    highest = max((record.number for record in records if record.hash != state.current), default=0)
    number = max(state.number, known.number if known is not None else 0)
    return number if number > highest else highest + 1


def old_enough(pods: Sequence[Object], now: datetime) -> bool:
    """Whether the pods had time for what passes by itself: a registry that answers again, a Secret that comes late."""
    made = [str(pod["metadata"].get("creationTimestamp", "")) for pod in pods]
    return bool(made) and all(text and now - datetime.fromisoformat(text) >= HOPELESS_AFTER for text in made)


def _finding(
    service: InferenceService,
    observed: Observed,
    records: list[Record],
    key: str,
    failed: Record | None,
    back: Record | None,
) -> Finding | None:
    if failed is not None and back is not None:
        name = manifests.record_name(service, failed.hash)
        text = (
            f"Revision {failed.hash} was given up: {failed.failed.rstrip('.')}. Revision {back.hash} runs in its "
            f"place. Change the spec, or try the same again: kubectl delete controllerrevision {name}"
        )
        return Finding("RolledBack", f"{text}.", stalled=True)
    current = observed.rollout.current
    there = next((record for record in records if record.hash == current), None)
    if service.rollout.paused and (there is None or there.key != key):
        still = f"; revision {current} runs on" if there is not None else ""
        return Finding("RolloutPaused", f"spec.rollout.paused is true: the newest revision waits{still}.")
    return None


def _records(
    service: InferenceService,
    observed: Observed,
    records: list[Record],
    template: Object,
    *,
    settled_on: bool,
    failed: Record | None,
) -> list[Action]:
    """The record of the revision that runs, of the one that was given up, and the end of old ones."""
    state = observed.rollout
    actions: list[Action] = []
    live = {item["metadata"]["name"]: item for item in observed.revisions}
    if failed is not None:
        manifest = manifests.record_manifest(service, failed)
        actions += ensure(live.get(manifest["metadata"]["name"]), manifest, f"revision {failed.hash} is given up")
    if settled_on and state.current and not service.rollout.paused:
        known = next((record for record in records if record.hash == state.current), None)
        served = bool(known and known.served) or (state.settled and state.ready > 0)
        key = manifests.template_key(template)
        # A record's data never changes; of a revision that is gone back to, the spec says nothing.
        spec = known.spec if known is not None else service.written if failed is None else {}
        number = _number(records, state, known)
        now = Record(state.current, key, number, template, served, spec=spec)
        if known is None or known.key == key:
            manifest = manifests.record_manifest(service, now)
            why = f"revision {state.current} {'has served' if served else 'is being rolled out'}"
            there = live.get(manifest["metadata"]["name"])
            actions += [replace(action, reason=why) for action in ensure(there, manifest, why)]
    old = [record for record in records[:-KEPT_RECORDS] if record.hash != state.current]
    for record in old:
        meta = live[manifests.record_name(service, record.hash)]["metadata"]
        actions.append(Delete("ControllerRevision", meta["name"], meta["uid"], "newer ones are kept"))
    return actions
