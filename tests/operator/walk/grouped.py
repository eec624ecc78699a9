"""Groups of pods in a walk: the stand-in for their controller at work, and what it and Kubernetes still have to do.

Invariants: what pods belong together is told by their names alone, as StatefulSets give them.
Knows nothing of how the operator sees groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.operator import stand_in
from tests.operator.stand_in import REVISION, STATEFUL_SET

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.observe.rollout import is_finished, is_ready, is_terminating

Object = dict[str, Any]
SIZE = "leaderworkerset.sigs.k8s.io/size"
# A group begins anew at once and for ever: so often one of a walk's does, and then its pods only load for ever.
CRASHES = 4


class Sets:
    """The StatefulSets of one namespace, behind which its groups stand, as they were last seen."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.there: list[Object] = []

    async def play(self, wanted: Sequence[Object]) -> bool:
        """One round of the controller of `wanted`, the LeaderWorkerSets; whether that changed anything."""
        if not wanted and not self.there:
            return False
        before = _versions(self.there)
        try:
            await stand_in.step(self._cluster, self._namespace)
        except ApiError as error:
            if error.status not in (404, 409):  # somebody was faster
                raise
        self.there = await self._cluster.list_all(STATEFUL_SET, self._namespace)
        return _versions(self.there) != before

    def waits(self, wanted: Sequence[Object], pods: Sequence[Object]) -> str:
        """What is still to be done for them; "" = nothing."""
        owners = {item["metadata"]["uid"] for item in (*wanted, *pods)}
        lost = [item for item in self.there if item["metadata"]["ownerReferences"][0]["uid"] not in owners]
        if lost:
            return f"StatefulSet {lost[0]['metadata']['name']} has no owner any more"
        named = {pod["metadata"]["name"]: pod for pod in pods}
        found = (_waits(item, named) for item in wanted if "deletionTimestamp" not in item["metadata"])
        return next(filter(None, found), "")


def _versions(items: Iterable[Object]) -> set[tuple[str, str]]:
    return {(item["metadata"]["uid"], item["metadata"]["resourceVersion"]) for item in items}


def _waits(item: Object, pods: Mapping[str, Object]) -> str:
    """A pod that goes is its kubelet's; a leader of before waits for those of higher numbers, until they serve."""
    name, replicas = item["metadata"]["name"], int(item["spec"]["replicas"])
    more = [each for each, pod in pods.items() if _number(name, each) >= replicas and not is_terminating(pod)]
    if more:
        return f"{more[0]} is one too many"
    turn = True
    for number in reversed(range(replicas)):
        leader = pods.get(f"{name}-{number}")
        if leader is None or (is_finished(leader) and not is_terminating(leader)):
            return f"{name} has no leader {number}"
        fresh = leader["metadata"]["labels"].get(REVISION) == stand_in.revision(item)
        if is_terminating(leader):
            turn = False
        elif not fresh and turn:
            return f"{leader['metadata']['name']} is one of before"
        elif fresh:
            mates = [pods.get(mate) for mate in _mates(leader)]
            if any(mate is None or (is_finished(mate) and not is_terminating(mate)) for mate in mates):
                return f"the group of {leader['metadata']['name']} is not all there"
            turn = turn and is_ready(leader)
    return ""


def _number(name: str, pod: str) -> int:
    """The number of the set's leader that has this name; -1 where none has."""
    text = pod.removeprefix(f"{name}-")
    return int(text) if text != pod and text.isdigit() else -1


def _mates(leader: Object) -> list[str]:
    size = int((leader["metadata"].get("annotations") or {}).get(SIZE, "1"))
    return [f"{leader['metadata']['name']}-{number}" for number in range(1, size)]


def lacks_mates(pod: Object, pods: Iterable[Object]) -> bool:
    """Whether it leads a group of which another pod does not compute; `pods` are those that do."""
    if pod["metadata"]["labels"].get("app.kubernetes.io/component") != "engine":
        return False
    there = {each["metadata"]["name"] for each in pods if _revision(each) == _revision(pod)}
    return not there.issuperset(_mates(pod))


def _revision(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(REVISION, ""))


def of_groups(live: Sequence[Object], service: Object) -> bool:
    """Whether pods are, or are to be, in groups, of which one is made anew in its own place."""
    return bool(live) or int(service["spec"]["resources"].get("nodes", 1)) > 1

