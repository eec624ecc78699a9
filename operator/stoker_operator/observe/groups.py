"""What a LeaderWorkerSet's pods say about a rollout: groups, each counted once, by the pod that leads it.

Invariants: a group is ready when its leader is, which answers only while all ranks compute, and all of its other pods
are there and ready too; a group of which a pod is going counts for nothing but the GPUs it holds.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from stoker_operator.manifests.groups.nodes import SET_NAME, index_of
from stoker_operator.manifests.identity import COMPONENT, WORKER
from stoker_operator.manifests.revision import TEMPLATE_KEY
from stoker_operator.observe.rollout import Rollout, is_finished, is_ready, is_terminating, template_hash

Object = Mapping[str, Any]
SIZE = "leaderworkerset.sigs.k8s.io/size"


def members(pods: Iterable[dict[str, Any]], sets: Container[str]) -> list[dict[str, Any]]:
    """Of `pods`, those of the LeaderWorkerSets named in `sets`.

    Between a set and its pods stand StatefulSets that carry no label of ours, so nobody here sees them: a pod's own
    label names its set, and its controller is the StatefulSet of that name, or the one that its leader's name gives.
    """
    return [
        pod
        for pod in pods
        if (name := index_of(pod, SET_NAME)) in sets and _controller(pod) in (name, f"{name}-{index_of(pod)}")
    ]


def is_worker(pod: Object) -> bool:
    """Whether a pod only computes, beside the leader of its group."""
    return (pod["metadata"].get("labels") or {}).get(COMPONENT) == WORKER


def mates(leader: Object, workers: Iterable[Object]) -> list[Object]:
    """The live pods of a leader's group and revision, but itself."""
    place = (index_of(leader), template_hash(leader))
    return [pod for pod in workers if (index_of(pod), template_hash(pod)) == place and not is_terminating(pod)]


def is_whole(leader: Object, workers: Iterable[Object], size: int) -> bool:
    """Whether a pod answers with all of its group: with `size` pods, itself included, or as many as it was made with. A
    pod of no group needs no others.
    """
    wanted = int((leader["metadata"].get("annotations") or {}).get(SIZE, size)) if index_of(leader) else 1
    there = 1 + sum(map(is_ready, mates(leader, workers)))
    return is_ready(leader) and not is_terminating(leader) and there >= wanted


def read_groups(
    live: Object, pods: Sequence[Object], workers: Sequence[Object], floor: int | None, silent: Container[str]
) -> Rollout:
    """The rollout as the cluster stands. `pods` are those that answer, the leaders among them; `floor` and `silent` as
    in rollout.py.
    """
    template = live["spec"]["leaderWorkerTemplate"]
    size = int(template["size"])

    def ready(pod: Object) -> bool:
        return pod["metadata"]["name"] not in silent and is_whole(pod, workers, size)

    going = {index_of(pod) or pod["metadata"]["name"] for pod in (*pods, *workers) if is_terminating(pod)}
    there = [pod for pod in pods if not is_terminating(pod) and not is_finished(pod)]
    current = str((template["leaderTemplate"]["metadata"].get("labels") or {}).get(TEMPLATE_KEY, ""))
    updated = [pod for pod in there if template_hash(pod) == current]
    desired = int(live["spec"].get("replicas", 1))
    return Rollout(
        desired=desired,
        total=len(there),
        ready=sum(map(ready, there)),
        updated=len(updated),
        updated_ready=sum(map(ready, updated)),
        terminating=len(going),
        current=current,
        floor=floor,
        members=size,
        # Groups are numbered from 0: one of a higher number than is wanted is there while others are changed.
        standing_in=sum(index_of(pod).isdigit() and int(index_of(pod)) >= desired for pod in there),
    )


def _controller(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(item["name"]) for item in owners if item["kind"] == "StatefulSet" and item.get("controller")), "")
