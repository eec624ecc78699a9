"""Why the pods are not what this generation asks for, once its Deployment is written.

Invariants: pure. A revision that was rolled out once is not rolled out again by a pod that restarts, comes or goes:
each of these has a reason of its own, and `RollingOut` is said of a change of revision alone.
Knows nothing of the cache and of what else may keep a service from being ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.revision import read_record
from stoker_operator.observe.capacity import requests
from stoker_operator.observe.rollout import Rollout, is_finished, is_terminating, template_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Finding
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.diagnose import Trouble
from stoker_operator.plan.groups.restarts import waits_for
from stoker_operator.plan.wording import counted, listed, short
from stoker_operator.spec.service import InferenceService

# What passes by itself, and does not make a service unready that has as many ready pods as it needs without this one.
PASSING = ("PodRestarting", "GroupRestarting", "PodNotReady", "CacheCorrupt", "PodWarns")


def pods_that_count(observed: Observed) -> list[Mapping[str, Any]]:
    """The pods whose trouble is this generation's: of the current revision where it is known, and not
    going.
    """
    current = observed.rollout.current
    live = [pod for pod in observed.serving_pods if not is_terminating(pod) and not is_finished(pod)]
    return [pod for pod in live if not current or template_hash(pod) == current]


def graver(pod: Trouble | None, group: Trouble | None) -> Trouble | None:
    """What to say of a pod's trouble and its group's: a container that ended is started again with its whole group."""
    if group is None or (pod is not None and pod.reason not in (*PASSING, "CrashLoop", "OutOfMemory")):
        return pod
    return group


def silence(observed: Observed) -> Trouble | None:
    """The trouble with pods that are said to be ready and do not answer."""
    for pod in pods_that_count(observed):
        name = pod["metadata"]["name"]
        if name in observed.silent:
            node = pod["spec"].get("nodeName", "")
            text = f"Pod {name} is said to be ready and does not answer: node {node} may have stopped reporting, or a "
            return Trouble("PodNotReady", f"{text}NetworkPolicy keeps the operator out.", False,
                           f"More: kubectl describe node {node}.")  # fmt: skip
    return None


def warned(service: InferenceService, observed: Observed) -> Trouble | None:
    """What is wrong with a pod that serves nevertheless: keys that it can no longer read, or its node cannot."""
    if not observed.rollout.settled:
        return None
    keys = service.endpoint.api_keys
    for pod in observed.engine_pods if keys is not None else ():
        words = observed.unmounted.get(pod["metadata"]["uid"])
        if keys is not None and words and not is_terminating(pod):
            text = f"Pod {pod['metadata']['name']} serves with the keys that it has, but its node cannot read Secret "
            text += (
                f"{keys.name} any more ({short(words)}). Create it, with a key {keys.key}: no new pod starts without."
            )
            return Trouble("PodWarns", text, False)
    said = next(((name, word) for name, word in sorted(observed.warnings.items())), None)
    return Trouble("PodWarns", f"Pod {said[0]} serves and says: {short(said[1])}", False) if said else None


def rotten(cache: CachePlan) -> Trouble | None:
    """What a verification found of the files that serve."""
    return Trouble(cache.rot.reason, cache.rot.message, cache.rot.stalled) if cache.rot is not None else None


def rolled_out(service: InferenceService, state: Rollout, answered: str) -> str:
    """The hash of the current revision if it was rolled out and answered, now or earlier while it was current;
    else "".
    """
    earlier = str((service.status.get("revisions") or {}).get("rolledOut", ""))
    if state.current and (earlier == state.current or (state.settled and state.ready and answered == state.current)):
        return state.current
    return "" if state.current else earlier


def pods_finding(
    service: InferenceService, observed: Observed, workload: tuple[Action, ...], trouble: Trouble | None, done: str
) -> Finding | None:
    """What keeps the pods from being what is asked for; None when nothing does.

    `workload` is what is done to the Deployment now, `done` the revision that is rolled out already, "" = none.
    """
    state = observed.rollout
    if workload:
        return _written(observed, workload, done)
    held = _held(service, observed, trouble) if trouble is not None else ""
    if trouble is not None and held:
        holds = f"holds its {held} until it is" if state.terminating == 1 else f"hold their {held} until they are"
        text = f"{counted(state.terminating, 'pod')} on the way out {holds} gone; then a new pod starts"
        return Finding("PodsStarting" if done else "RollingOut", f"{text}. {trouble.message}")
    if trouble is not None and not (state.settled and trouble.reason in PASSING):
        return _troubled(trouble)
    if not state.current:
        return _not_taken_up(observed, done)
    if state.settled:
        return Finding("ScaledToZero", "No replicas are asked for.") if state.desired == 0 else None
    return _unsettled(service, observed, done)


def _held(service: InferenceService, observed: Observed, trouble: Trouble) -> str:
    """What a pod that waits for a node lacks and pods on the way out still hold; "" = nothing."""
    leaving = [requests(pod.get("spec") or {}) for pod in observed.serving_pods if is_terminating(pod)]
    names = sorted(name for name in trouble.lacking if any(name in held for held in leaving))
    return listed(["GPU" if name == service.resources.gpu_resource else name for name in names], "and") if names else ""


def _troubled(trouble: Trouble) -> Finding:
    if trouble.reason == "CacheCorrupt":  # the cache is sound by now, or it would have been said before the pods
        text = f"The cache is repaired; its pod goes on after a short wait. Before: {trouble.said}"
        return Finding("PodRestarting", text)
    return Finding(trouble.reason, trouble.message, trouble.permanent)


def _written(observed: Observed, workload: tuple[Action, ...], done: str) -> Finding:
    """The Deployment is written in this very reconcile: with another template, or another number of pods."""
    [action], unit = workload, observed.rollout.unit
    live = observed.child(action.manifest) if isinstance(action, Apply) else None
    if isinstance(action, Apply) and live is not None and done:
        wanted = int(action.manifest["spec"].get("replicas", observed.rollout.desired))
        if manifests.live_template_key(live) == manifests.live_template_key(action.manifest):
            if wanted > observed.rollout.total:
                return Finding("PodsStarting", f"{counted(wanted, unit)} of revision {done} were just asked for.")
            if wanted < observed.rollout.total:
                text = f"{counted(wanted, unit)} of revision {done} were just asked for"
                return Finding("PodsStopping", f"{text}; {counted(observed.rollout.total, unit)} run.")
    written = action.manifest["kind"] if isinstance(action, Apply) else "Deployment"
    return Finding("RollingOut", f"The {written} was just written; its pods follow.")


def _not_taken_up(observed: Observed, done: str) -> Finding:
    """The Deployment's controller has not seen the newest generation, which may only ask for another number of pods."""
    state, wait = observed.rollout, "the Deployment's controller has not taken it up yet"
    if done and _is_record_of_live(observed, done):
        text = f"{counted(state.desired, 'pod')} of revision {done} were asked for; {wait}."
        return Finding("PodsStarting" if state.desired >= state.total else "PodsStopping", text)
    return Finding("RollingOut", "The Deployment's controller has not taken up the newest revision yet.")


def _is_record_of_live(observed: Observed, template_hash: str) -> bool:
    """Whether the Deployment was last applied with the template of this revision."""
    workloads = observed.of_kinds("Deployment", manifests.LEADER_WORKER_SET[1])
    live = {manifests.live_template_key(item) for _, _, item in workloads}
    return any(record.hash == template_hash and record.key in live for record in map(read_record, observed.revisions))


def _unsettled(service: InferenceService, observed: Observed, done: str) -> Finding:
    state = observed.rollout
    text = f"{state.updated_ready} of {state.desired} {state.unit}s of revision {state.current} are ready"
    text += waits_for(observed)
    old = state.total - state.updated
    if old:
        text += f"; {old} of an older revision still {'runs' if old == 1 else 'run'}"
    if state.standing_in and not old and state.total <= state.desired:
        text += f"; {counted(state.standing_in, state.unit)} beside those wanted until these are made anew"
    if state.terminating:
        text += f"; {state.terminating} {'is' if state.terminating == 1 else 'are'} on the way out"
    pulling = sum(map(_pulls_the_model, pods_that_count(observed)))
    if pulling:
        text += f"; {counted(pulling, 'pod')} {'waits' if pulling == 1 else 'wait'} for the model's image to be pulled"
    if state.failed:
        return Finding("RolloutFailed", f"{text}. {state.failed}", stalled=True)
    reason = "RollingOut" if done != state.current or old else "PodsStarting"
    keys = service.endpoint.api_keys
    if keys is not None and any(_waits_for_volumes(pod) for pod in pods_that_count(observed)):
        # A volume's Secret that is missing shows in no pod's status, only in the kubelet's events.
        return Finding(
            reason, f"{text}. A pod waits for its volumes: is there a Secret {keys.name} with a key {keys.key}?"
        )
    if reason == "RollingOut":
        return Finding(reason, f"{text}.")
    if state.total > state.desired:
        return Finding("PodsStopping", f"{text}; {state.total - state.desired} more than asked for.")
    return Finding(reason, f"{text}; the revision is rolled out, and what is missing starts.")


def _waits_for_volumes(pod: Mapping[str, Any]) -> bool:
    """Whether a node has the pod and none of its containers was ever started."""
    status = pod.get("status", {})
    statuses = status.get("initContainerStatuses") or ()
    waiting = [(item.get("state") or {}).get("waiting", {}).get("reason") for item in statuses]
    return status.get("phase") == "Pending" and "PodInitializing" in waiting


def _pulls_the_model(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's node is about to mount an image, and has made no container since."""
    status = pod.get("status", {})
    placed = any(
        item["type"] == "PodReadyToStartContainers" and item["status"] == "True"
        for item in status.get("conditions") or ()
    )
    waiting = [
        (item.get("state") or {}).get("waiting", {}).get("reason") for item in status.get("containerStatuses") or ()
    ]
    mounts = any("image" in volume for volume in pod.get("spec", {}).get("volumes") or ())
    return mounts and placed and "ContainerCreating" in waiting
