"""plan/placing.py: where the pods of a change go: beside the old ones, or in the place of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.plan.changes import IN_PLACE, SURGE, UNSCHEDULABLE, changed, ready, written

from stoker_operator import manifests
from stoker_operator.observe.capacity import Room
from stoker_operator.observe.capacity import requests as pod_requests

Object = dict[str, Any]
SPARE, FREED, NONE = Room(spare=True, freed=True), Room(spare=False, freed=True), Room(spare=False, freed=False)
BIGGER = {"gpus": 1, "memory": "900Gi"}
CHANGES: dict[str, tuple[int, Room | None, Object, Object]] = {
    # name: (GPUs, what the nodes say, what changes besides, how it goes)
    "a GPU is free": (1, SPARE, {}, SURGE),
    "no GPU is free": (1, FREED, {}, IN_PLACE),
    "no node would do, whoever leaves": (1, NONE, {}, SURGE),
    "four GPUs of a replica are free": (4, SPARE, {}, SURGE),
    "four GPUs of a replica are free once it leaves": (4, FREED, {}, IN_PLACE),
    "nobody may look": (1, None, {}, IN_PLACE),
    "nobody may look for four GPUs": (4, None, {}, IN_PLACE),
    "nobody may look, and it asks for more": (1, None, {"resources": BIGGER}, SURGE),
    "nobody may look, and it is choosier": (1, None, {"placement": {"nodeSelector": {"a": "b"}}}, SURGE),
    "no GPU is needed": (0, None, {}, SURGE),
    "no GPU is needed, and no node would do": (0, NONE, {}, SURGE),
}


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES)
def test_a_change_takes_an_old_pods_place_only_where_that_makes_room(
    world: Any, service: Any, case: tuple[int, Room | None, Object, Object]
) -> None:
    gpus, room, change, expected = case
    there = changed(world(resources={"gpus": gpus}, parallelism={"tensor": max(1, gpus)}).pod())
    if change:
        wanted = service(**({"resources": {"gpus": gpus}} | change))
        there.service = replace(there.service, resources=wanted.resources, placement=wanted.placement)
    there.room = room
    [deployment] = written(there, "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == expected
    asked = there.plan().asks_room
    assert (asked is not None) is (gpus > 0 and room is None)
    if asked is not None:
        assert asked == [deployment["spec"]["template"]["spec"]]
        assert str(pod_requests(asked[0])["nvidia.com/gpu"]) == str(gpus)


def test_where_nothing_serves_nothing_is_lost(world: Any) -> None:
    there = changed(world(resources={"gpus": 1}).pod(ready=False))
    there.room = NONE
    assert written(there, "Deployment")[0]["spec"]["strategy"]["rollingUpdate"] == IN_PLACE


def test_room_is_asked_for_changes_alone(world: Any) -> None:
    assert world(resources={"gpus": 1}).pod().plan().asks_room is None
    explicit = changed(world(resources={"gpus": 1}, rollout={"strategy": "RollingUpdate"}).pod())
    assert explicit.plan().asks_room is None


def unplaced(text: str) -> list[Object]:
    return [{"type": "PodScheduled", "status": "False", "message": f"0/3 nodes are available: {text}."}]


GPU, MEMORY = "3 Insufficient nvidia.com/gpu", "3 Insufficient memory"
STUCK: dict[str, tuple[int, int, str, Room | None, bool]] = {
    # name: (GPUs, ready old pods, what the scheduler says, what the nodes say, whether an old pod gives way)
    "the old pod holds the GPU": (1, 1, GPU, FREED, True),
    "nobody may look at nodes": (1, 1, GPU, None, True),
    "no node would do, whoever leaves": (1, 1, MEMORY, NONE, False),
    "a selector": (1, 1, "3 node(s) didn't match Pod's node affinity/selector", FREED, False),
    "a taint": (1, 1, "3 node(s) had untolerated taint {a: b}", FREED, False),
    "a volume": (1, 1, "3 node(s) had volume node affinity conflict", FREED, False),
    "partly a selector": (1, 1, f"1 node(s) didn't match Pod's node affinity/selector, 2 {GPU[2:]}", FREED, True),
    "the one answering pod on a CPU": (0, 1, MEMORY, FREED, False),
    "one of two answering pods on CPUs": (0, 2, MEMORY, FREED, True),
    "the one answering pod on a CPU, nobody may look": (0, 1, MEMORY, None, False),
}


@pytest.mark.parametrize("case", STUCK.values(), ids=STUCK)
def test_a_new_pod_that_finds_no_node_ends_an_old_one_only_where_that_makes_room(
    world: Any, case: tuple[int, int, str, Room | None, bool]
) -> None:
    gpus, old, said, room, gives_way = case
    there = world(resources={"gpus": gpus}, rollout={"strategy": "Auto"}, replicas=old)
    deployment = there.children["Deployment", "demo"]
    surging = manifests.deployment(
        there.service, there.settings, there.model, manifests.Variant(old, 1, 0, deployment["spec"]["template"])
    )
    live = there.live(surging) | {"status": {"observedGeneration": 1}}
    live["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "1"}
    there.children["Deployment", "demo"] = live
    for _ in range(old):
        there.pod("old")
    there.pod("new", ready=False, phase="Pending")
    there.room = room
    assert not written(there, "Deployment")  # as it went, so it goes on
    there.pods[-1]["status"]["conditions"] = unplaced(said)
    found = written(there, "Deployment")
    assert [item["spec"]["strategy"]["rollingUpdate"] for item in found] == ([IN_PLACE] if gives_way else [])
    assert ready(there).reason == ("RollingOut" if gives_way else "Unschedulable")
    there.pod("old", deletionTimestamp="t")
    there.pods[-1]["metadata"]["deletionTimestamp"] = "t"
    assert not written(there, "Deployment")  # one is on its way out already
    del there.pods[-1], there.pods[:old]
    assert not written(there, "Deployment")  # no old pod holds anything: surge is not what keeps it


def test_terminating_pods_hold_their_gpus(world: Any) -> None:
    there = world(resources={"gpus": 1}).pod("new", ready=False, phase="Pending", conditions=UNSCHEDULABLE)
    there.pods.append({"metadata": {"name": "gone", "labels": {}, "deletionTimestamp": "t"}, "status": {}})
    assert ready(there).reason == "Unschedulable"  # who leaves holds nothing of what is missing
    there.pods[-1]["spec"] = there.pods[0]["spec"]
    found = ready(there)
    assert found.reason == "RollingOut"
    assert "1 pod on the way out holds its GPU until it is gone" in found.message
