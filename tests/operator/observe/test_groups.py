"""groups.py: a group is counted once, by its leader, and is ready with all of its pods."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.operator.observe.nodes import Nodes, asking

from stoker_operator.observe.groups import members, read_groups
from stoker_operator.observe.observe import room_for
from stoker_operator.observe.snapshot import Observed

Object = dict[str, Any]
PREFIX = "leaderworkerset.sigs.k8s.io"


def workload(size: int, replicas: int, key: str = "new") -> Object:
    labels = {"metadata": {"labels": {"stoker.dev/template": key}}}
    return {"spec": {"replicas": replicas, "leaderWorkerTemplate": {"size": size, "leaderTemplate": labels}}}


def pod(name: str, group: str, *, key: str = "new", ready: bool = True, **meta: Any) -> Object:
    labels = {"stoker.dev/template": key, f"{PREFIX}/group-index": group}
    conditions = [{"type": "Ready", "status": str(ready)}]
    found = {"name": name, "uid": name, "labels": {key: value for key, value in labels.items() if value}}
    return {"metadata": found | meta, "spec": {}, "status": {"phase": "Running", "conditions": conditions}}


def group(index: int, size: int, **more: Any) -> tuple[list[Object], list[Object]]:
    return [pod(f"l{index}", str(index), **more)], [pod(f"w{index}-{n}", str(index), **more) for n in range(1, size)]


def read(size: int, replicas: int, *there: tuple[list[Object], list[Object]], silent: tuple[str, ...] = ()) -> Any:
    leaders = [leader for each, _ in there for leader in each]
    workers = [worker for _, each in there for worker in each]
    return read_groups(workload(size, replicas), leaders, workers, None, silent)


def test_groups_are_counted_and_not_their_pods() -> None:
    size, count = random.randrange(2, 7), random.randrange(1, 6)
    state = read(size, count, *(group(index, size) for index in range(count)))
    assert (state.desired, state.total, state.ready, state.updated_ready) == (count,) * 4
    assert (state.settled, state.unit, state.members) == (True, "group", size)


@pytest.mark.parametrize("what", ["unready", "missing", "terminating", "of another revision", "of another group"])
def test_a_worker_that_is_not_there_makes_its_group_unready(what: str) -> None:
    leaders, workers = group(0, 4)
    if what == "unready":
        workers[1] = pod("w0-2", "0", ready=False)
    elif what == "missing":
        del workers[2]
    elif what == "terminating":
        workers[0] = pod("w0-1", "0", deletionTimestamp="t")
    else:
        workers[0] = pod("w", "1") if "group" in what else pod("w0-1", "0", key="old")
    state = read(4, 2, (leaders, workers), group(1, 4))
    assert (state.ready, state.settled) == (1, False)


def test_a_silent_leader_is_not_ready_and_a_pod_of_no_group_needs_no_others() -> None:
    single = pod("single", "", key="", labels={"pod-template-hash": "old"})
    state = read(3, 1, group(0, 3), ([single], []), silent=("l0",))
    assert (state.total, state.ready, state.updated_ready) == (2, 1, 0)


def test_groups_on_their_way_out_are_counted_once() -> None:
    going = group(0, 3, deletionTimestamp="t")
    assert read(3, 1, going, group(1, 3)).terminating == 1
    half = ([pod("l2", "2")], [pod("w2-1", "2", deletionTimestamp="t")])
    assert read(2, 1, half).terminating == 1


def test_a_group_of_an_older_size_is_whole_as_it_was_made() -> None:
    leaders, workers = group(0, 2, key="old", annotations={f"{PREFIX}/size": "2"})
    state = read(4, 1, (leaders, workers))
    assert (state.ready, state.updated) == (1, 0)


def owned(name: str, owner: str, group: str, kind: str = "StatefulSet") -> Object:
    labels = {f"{PREFIX}/name": "demo-nodes", f"{PREFIX}/group-index": group}
    references = [{"kind": kind, "name": owner, "controller": True}]
    return {"metadata": {"name": name, "labels": labels, "ownerReferences": references}}


def test_labels_alone_make_no_pod_the_services() -> None:
    ours = [owned("demo-nodes-0", "demo-nodes", "0"), owned("demo-nodes-0-1", "demo-nodes-0", "0")]
    others = [
        owned("a", "other", "0"),
        owned("b", "demo-nodes-other", "0"),
        owned("c", "demo-nodes", "0", kind="ReplicaSet"),
        owned("d", "demo-nodes-1", "0"),
    ]
    assert members([*others, *ours], {"demo-nodes"}) == ours
    assert members(ours, set()) == []


@pytest.mark.parametrize(
    ("gpus", "spare", "freed"),
    [
        ([4, 4, 4, 4], True, True),
        ([4, 4, 4], False, True),  # one node is free, a group needs two
        ([4, 4, 2], False, True),
        ([4, 2, 8], True, True),  # two pods of a group on one node
    ],
)
async def test_room_is_that_of_a_whole_group(gpus: list[int], spare: bool, freed: bool) -> None:
    there = [pod("l0", "0"), pod("w0-1", "0")]
    for each in there:
        each["spec"] = asking(4)
    holding = {0: [there[0]], 1: [there[1]]} if gpus[1] == 4 else {0: [there[0]]}
    observed = Observed(engine_pods=(there[0],), worker_pods=(there[1],))
    found = await room_for(Nodes(gpus, holding), observed, [asking(4), asking(4)])  # type: ignore[arg-type]
    assert found is not None
    assert (found.spare, found.freed) == (spare, freed)


async def test_half_a_group_leaves_no_room_for_a_whole_one() -> None:
    """A node of which somebody else took the place: what the group gives back is not enough."""
    there = [pod("l0", "0"), pod("w0-1", "0")]
    other = {"metadata": {"uid": "other"}, "spec": asking(1), "status": {}}
    for each in there:
        each["spec"] = asking(3)
    observed = Observed(engine_pods=(there[0],), worker_pods=(there[1],))
    nodes = Nodes([4, 4], {0: [there[0], other], 1: [there[1], other]})
    found = await room_for(nodes, observed, [asking(4), asking(4)])  # type: ignore[arg-type]
    assert found is not None
    assert (found.spare, found.freed) == (False, False)
