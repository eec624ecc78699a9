"""Plans what groups need besides their pods, whether the cluster has groups at all, and the end of the workload that
another one replaces.

A service that comes to span nodes, or no longer does, gets its new workload beside the old one. The old one ends when
the new one answered; or before, where it serves nothing, or where it holds what the new one waits for, as GPUs.
Invariants: pure; no workload ends before the one that takes its place is there.
Knows nothing of revisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.capacity import requests
from stoker_operator.observe.rollout import is_ready, is_terminating, template_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Delete, Finding, Generate, ensure
from stoker_operator.plan.diagnose import lacks_secret, trouble_of
from stoker_operator.plan.endpoint import not_given
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
KIND = manifests.LEADER_WORKER_SET[1]


def has_groups(service: InferenceService, observed: Observed) -> bool:
    """Whether there are groups, or are to be: while they are replaced, their pods still talk to each other."""
    return service.resources.spans_nodes or (KIND, manifests.group_name(service)) in observed.children


def lacks_kind(observed: Observed) -> Finding | None:
    """Why there can be no groups here; None where there can."""
    if KIND in observed.without:
        return Finding("FeatureOff", not_given(f"{KIND}s", "leaderWorkerSet"), stalled=True)
    if KIND in observed.served:
        return None
    text = f"No API serves {manifests.LEADER_WORKER_SET[0]}, which runs replicas of more than one node. Install "
    text += "LeaderWorkerSet (https://lws.sigs.k8s.io/docs/installation/), or set resources.nodes: 1."
    return Finding("LeaderWorkerSetMissing", text, stalled=True)


def meeting_place(service: InferenceService, observed: Observed) -> list[Action]:
    """The Service by which the pods of groups find each other, and its end."""
    manifest = manifests.group_service(service)
    live = observed.child(manifest)
    if has_groups(service, observed):
        return list(ensure(live, manifest, "the pods of a group find each other by it"))
    if live is None or "deletionTimestamp" in live["metadata"]:
        return []
    return [Delete("Service", live["metadata"]["name"], live["metadata"]["uid"], "there are no groups any more")]


def shared_secret(service: InferenceService, observed: Observed, workload: tuple[Action, ...]) -> list[Action]:
    """The secret of the groups, with the workload that they are of; again, where a pod finds it gone. Nobody reads
    Secrets here.
    """
    made = any(isinstance(action, Apply) and action.create and action.manifest["kind"] == KIND for action in workload)
    missed = any(lacks_secret(pod, manifests.group_name(service)) for pod in observed.serving_pods)
    if not made and not missed:
        return []
    why = "the pods of a group know each other by it"
    secret = manifests.group_secret(service)
    return [Generate(secret, manifests.SECRET_KEY, manifests.group_owner(service), why)]


def replaced(
    service: InferenceService, observed: Observed, target: tuple[str, str], answered: str, *, back: bool
) -> list[Action]:
    """The end of the workload whose place `target`, (kind, name), takes. `back`: what it replaces was given up."""
    names = {"Deployment": service.name, KIND: manifests.group_name(service)}
    other = next((key for key in names.items() if key != target), target)
    old, new = observed.children.get(other), observed.children.get(target)
    if old is None or new is None or any("deletionTimestamp" in each["metadata"] for each in (old, new)):
        return []
    if not (back or _taken_over(observed, answered) or _gives_way(service, observed)):
        return []
    meta = old["metadata"]
    return [Delete(other[0], meta["name"], meta["uid"], f"{target[0]} {target[1]} takes its place", foreground=True)]


def _taken_over(observed: Observed, answered: str) -> bool:
    """Whether the old pods are not needed any more, or are of no use."""
    state = observed.rollout
    wanted = state.desired if state.floor is None else min(state.floor, state.desired)
    serves = any(is_ready(pod) and not is_terminating(pod) for pod in _old(observed))
    return not serves or (bool(state.current) and answered == state.current and state.updated_ready >= wanted)


def _gives_way(service: InferenceService, observed: Observed) -> bool:
    """Whether a new pod waits for what old ones hold, their GPUs: the change of workload cannot go beside them then."""
    if not service.resources.on_gpu:
        return False
    held = {name for pod in _old(observed) for name in requests(pod.get("spec") or {})}
    old = _old(observed)
    troubles = (trouble_of(pod) for pod in observed.serving_pods if pod not in old and not is_terminating(pod))
    return any(trouble is not None and bool(held & set(trouble.lacking)) for trouble in troubles)


def _old(observed: Observed) -> list[Object]:
    return [pod for pod in observed.serving_pods if template_hash(pod) != observed.rollout.current]
