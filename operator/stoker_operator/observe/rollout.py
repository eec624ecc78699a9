"""What a Deployment's pods say about a rollout, by pod template hash and never by counts alone.

Invariants: a Deployment whose controller has not seen its newest generation has no current revision yet; a
pod that terminates counts for nothing but the GPU it holds.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.manifests.revision import TEMPLATE_KEY

TEMPLATE_HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Pods by what they are. `current` is the template hash that the newest generation rolls out, "" = unknown, and
    `number` the Deployment's own number of it.

    `failed` is the Deployment's own word that it makes no progress any more, "" = it does. `floor`: with an autoscaler,
    so many ready pods are enough; what it adds beyond is load, not a rollout. `members`: pods that are one replica;
    where there are several, every number is one of groups. `standing_in`: of those that there are, groups that go once
    the ones whose place they take are made anew.
    """

    desired: int = 0
    total: int = 0
    ready: int = 0
    updated: int = 0
    updated_ready: int = 0
    terminating: int = 0
    current: str = ""
    failed: str = ""
    number: int = 0
    deadline_exceeded: bool = False
    floor: int | None = None
    members: int = 1
    standing_in: int = 0

    @property
    def unit(self) -> str:
        """What a replica is called."""
        return "pod" if self.members == 1 else "group"

    @property
    def settled(self) -> bool:
        """Every pod wanted is there, of the current revision and ready, and there is no other."""
        if not self.current:
            return False
        if self.floor is None or self.desired == 0:
            return self.updated_ready == self.desired == self.total and not self.standing_in
        return self.updated == self.total and self.updated_ready >= min(self.floor, self.desired)


def is_terminating(pod: Object) -> bool:
    """Whether the pod is on its way out, its phase notwithstanding."""
    return "deletionTimestamp" in pod["metadata"]


def is_finished(pod: Object) -> bool:
    """Whether the pod will never run again (an evicted pod, say)."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_pending(pod: Object) -> bool:
    """Whether no container of the pod was started yet; of a pod that has no status, too."""
    return (pod.get("status", {}).get("phase") or "Pending") == "Pending"


def is_ready(pod: Object) -> bool:
    """Whether the kubelet's readiness probe passes: /ready, hence a warm-up completion."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def template_hash(pod: Object) -> str:
    """The revision a pod belongs to: of a group, by the key of its template, which the group's pods carry."""
    labels = pod["metadata"].get("labels") or {}
    return str(labels.get(TEMPLATE_HASH) or labels.get(TEMPLATE_KEY, ""))


def read(
    deployment: Object | None,
    replica_sets: Sequence[Object],
    pods: Sequence[Object],
    floor: int | None = None,
    silent: Container[str] = (),
) -> Rollout:
    """The rollout as the cluster stands. Pods named in `silent` are said to be ready and do not answer."""

    def ready(pod: Object) -> bool:
        return is_ready(pod) and pod["metadata"].get("name") not in silent

    terminating = sum(is_terminating(pod) for pod in pods)
    live = [pod for pod in pods if not is_terminating(pod) and not is_finished(pod)]
    if deployment is None:
        return Rollout(total=len(live), ready=sum(map(ready, live)), terminating=terminating)
    current, number = _current(deployment, replica_sets)
    updated = [pod for pod in live if current and template_hash(pod) == current]
    return Rollout(
        desired=int(deployment["spec"].get("replicas", 1)),
        total=len(live),
        ready=sum(map(ready, live)),
        updated=len(updated),
        updated_ready=sum(map(ready, updated)),
        terminating=terminating,
        current=current,
        failed=_failure(deployment),
        number=number,
        deadline_exceeded=_deadline_exceeded(deployment),
        floor=floor,
    )


def _current(deployment: Object, replica_sets: Sequence[Object]) -> tuple[str, int]:
    meta = deployment["metadata"]
    if deployment.get("status", {}).get("observedGeneration", 0) < meta.get("generation", 1):
        return "", 0
    wanted = (meta.get("annotations") or {}).get(REVISION)
    for item in replica_sets:
        owners = item["metadata"].get("ownerReferences") or ()
        mine = any(owner["uid"] == meta["uid"] for owner in owners)
        if wanted and mine and (item["metadata"].get("annotations") or {}).get(REVISION) == wanted:
            return template_hash(item), int(wanted)
    return "", 0


def _deadline_exceeded(deployment: Object) -> bool:
    conditions = deployment.get("status", {}).get("conditions") or ()
    return any(item.get("reason") == "ProgressDeadlineExceeded" and item["status"] == "False" for item in conditions)


def _failure(deployment: Object) -> str:
    for item in deployment.get("status", {}).get("conditions") or ():
        stuck = item["type"] == "Progressing" and item["status"] == "False"
        if stuck or (item["type"] == "ReplicaFailure" and item["status"] == "True"):
            return str(item.get("message", item.get("reason", "")))
    return ""
