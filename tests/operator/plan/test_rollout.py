"""plan/rollout.py: how a change goes about GPUs, what is recorded of a revision, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.observe.capacity import Room
from stoker_operator.plan.actions import Apply, Condition, Delete

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
IN_PLACE = {"maxSurge": 0, "maxUnavailable": 1}
SURGE = {"maxSurge": 1, "maxUnavailable": 0}
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "message": "0/1: 1 Insufficient nvidia.com/gpu."}]
LATE = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}]


@pytest.fixture
def world(world: Any) -> Any:
    """As everywhere, with no revision recorded yet."""

    def build(**spec: Any) -> Any:
        there = world(**spec)
        there.revisions.clear()
        return there

    return build


def changed(there: Any) -> Any:
    there.service = replace(there.service, runtime=replace(there.service.runtime, args=("--seed", "1")))
    return there


def live_strategy(there: Any, strategy: Object) -> Any:
    there.children["Deployment", "demo"]["spec"]["strategy"]["rollingUpdate"] = dict(strategy)
    return there


def written(there: Any, kind: str) -> list[Any]:
    return [a.manifest for a in there.plan().actions if isinstance(a, Apply) and a.manifest["kind"] == kind]


def ready(there: Any) -> Condition:
    found: Condition = next(item for item in there.plan().conditions if item.type == "Ready")
    return found


SPARE, FREED, NONE = Room(spare=True, freed=True), Room(spare=False, freed=True), Room(spare=False, freed=False)
BIGGER = {"gpus": 1, "memory": "900Gi"}
CHANGES: dict[str, tuple[int, Room | None, Object, Object]] = {
    # name: (GPUs, what the nodes say, what changes besides, how it goes)
    "a GPU is free": (1, SPARE, {}, SURGE),
    "no GPU is free": (1, FREED, {}, IN_PLACE),
    "no node would do, whoever leaves": (1, NONE, {}, SURGE),
    "nobody may look": (1, None, {}, IN_PLACE),
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
    there = changed(world(resources={"gpus": gpus}).pod())
    if change:
        wanted = service(**({"resources": {"gpus": gpus}} | change))
        there.service = replace(there.service, resources=wanted.resources, placement=wanted.placement)
    there.room = room
    [deployment] = written(there, "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == expected
    asked = there.plan().asks_room
    assert (asked is not None) is (gpus > 0 and room is None)
    assert asked is None or asked == deployment["spec"]["template"]["spec"]


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


RECORDS: dict[str, tuple[Callable[[Any], Any], bool, str]] = {
    # name: (what is there, whether the record is written, its served annotation)
    "rolled out": (lambda w: w.pod(ready=False), True, "false"),
    "served": (lambda w: w.pod(), True, "true"),
    "known": (lambda w: w.pod(ready=False).record("new", 1), False, ""),
    "known, serves now": (lambda w: w.pod().record("new", 1), True, "true"),
    "known, served before": (lambda w: w.pod(ready=False).record("new", 1, served=True), False, ""),
    "being changed": (lambda w: changed(w.pod()), False, ""),
}


@pytest.mark.parametrize("case", RECORDS.values(), ids=RECORDS)
def test_each_revision_is_recorded(world: Any, case: tuple[Callable[[Any], Any], bool, str]) -> None:
    arrange, expected, served = case
    records = written(arrange(world()), "ControllerRevision")
    assert bool(records) is expected
    if expected:
        assert records[0]["metadata"]["name"] == "demo-new"
        assert records[0]["metadata"]["annotations"]["stoker.dev/served"] == served
        assert records[0]["revision"] == 1


def test_a_record_that_changes_says_what_of_it(world: Any) -> None:
    [change] = [a for a in world().pod().record("new", 1).plan().actions if a.manifest["kind"] == "ControllerRevision"]
    assert change.event == ("Updated", "Updated ControllerRevision demo-new: revision new has served.")


def test_old_records_go_the_current_one_never(world: Any) -> None:
    there = world().pod().record("new", 1, served=True)
    for number in range(2, 9):
        there.record(f"r{number}", number, key=f"k{number}", served=True)
    gone = [a.name for a in there.plan().actions if isinstance(a, Delete) and a.kind == "ControllerRevision"]
    assert gone == ["demo-r2", "demo-r3"]


def late(there: Any) -> Any:
    there.children["Deployment", "demo"]["status"]["conditions"] = LATE
    return there


def test_a_revision_that_never_becomes_ready_is_rolled_back(world: Any) -> None:
    there = world().pod(ready=False).record("new", 2).record("good", 1, key="good", served=True)
    assert not written(there, "Deployment")  # it still has time
    late(there)
    [deployment] = written(there, "Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"] == {"was": "good"}
    [given_up] = [item for item in written(there, "ControllerRevision") if item["metadata"]["name"] == "demo-new"]
    assert given_up["metadata"]["annotations"]["stoker.dev/failed"] == "timed out"
    found = ready(there)
    assert (found.reason, found.status) == ("RolledBack", "False")
    assert "kubectl delete controllerrevision demo-new" in found.message
    assert there.status()["revisions"] == {"current": "new", "previous": "good", "failed": "new", "generation": 1}


PULL = [{"name": "engine", "image": "i", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}]
HOPELESS: dict[str, tuple[int, bool, list[Object], bool]] = {
    # name: (seconds since the pod was made, whether an old one serves, its containers, whether it is given up)
    "it went in place and cannot run": (91, False, PULL, True),
    "it may pass by itself": (30, False, PULL, False),
    "the old one serves": (91, True, PULL, False),
    "it only takes its time": (91, False, [], False),
}


@pytest.mark.parametrize("case", HOPELESS.values(), ids=HOPELESS)
def test_who_cannot_run_does_not_keep_the_place_of_who_served(
    world: Any, case: tuple[int, bool, list[Object], bool]
) -> None:
    age, serves, containers, given_up = case
    there = world().pod("new", ready=False, phase="Pending", containerStatuses=containers)
    there.pods[0]["metadata"]["creationTimestamp"] = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    there.record("new", 2).record("good", 1, key="good", served=True)
    if serves:
        there.pod("good")
    back = [item["spec"]["template"]["metadata"]["labels"] for item in written(there, "Deployment")]
    assert back == ([{"was": "good"}] if given_up else [])
    assert (ready(there).reason == "RolledBack") is given_up


def rolled_back(there: Any) -> Any:
    """The cluster once a rollback is through: the good revision runs again."""
    there.record("new", 2, failed="it crashed").record("good", 1, key="good", served=True)
    there.current, there.number = "good", 3
    return there.pod("good")


def test_rolled_back_it_stays_until_the_spec_changes_or_the_record_goes(world: Any) -> None:
    there = rolled_back(world())
    [deployment] = written(there, "Deployment")
    live = there.live(deployment) | {"status": {"observedGeneration": 1}}
    live["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "3"}
    live["spec"]["replicas"] = 1
    there.children["Deployment", "demo"] = live
    there.service = replace(there.service, status=there.service.status | {"revisions": {"answered": "good"}})
    plan = there.plan()
    assert not written(there, "Deployment")
    assert plan.requeue_after is None
    by_type = {item.type: item for item in plan.conditions}
    assert by_type["Ready"].reason == "RolledBack"
    assert "it crashed" in by_type["Ready"].message
    assert (by_type["Stalled"].status, by_type["Servable"].status) == ("True", "True")
    # The record of the good one moves up: it is what a later failure goes back to.
    assert [item["revision"] for item in written(there, "ControllerRevision")] == [3]
    again = changed(rolled_back(world()))
    [wanted] = written(again, "Deployment")
    assert "--seed" in str(wanted)
    retried = rolled_back(world())
    retried.revisions.pop(0)
    retried.children["Deployment", "demo"] = live
    [wanted] = written(retried, "Deployment")
    assert wanted["spec"]["template"]["metadata"]["labels"] != {"was": "good"}


@pytest.mark.parametrize(
    "arrange",
    [
        lambda w: w.record("new", 2),
        lambda w: w.record("new", 2).record("bad", 1, key="bad"),
        lambda w: w.record("new", 2, served=True).record("good", 1, key="good", served=True),
    ],
    ids=["nothing to go back to", "nothing that served", "it served before"],
)
def test_no_way_back(world: Any, arrange: Callable[[Any], Any]) -> None:
    there = late(arrange(world().pod(ready=False)))
    assert not written(there, "Deployment")
    assert ready(there).reason == "RolloutFailed"


def test_no_rollback_unasked(world: Any) -> None:
    there = world(rollout={"autoRollback": False}).pod(ready=False)
    there = late(there.record("new", 2).record("good", 1, key="good", served=True))
    assert not written(there, "Deployment")
    assert ready(there).reason == "RolloutFailed"
    assert "failed" not in there.status()["revisions"]


def busy(there: Any, load: int | None, since: str = "") -> Any:
    there.load = load
    if since:
        there.service = replace(there.service, status=there.service.status | {"revisions": {"waitingSince": since}})
    return there


WAITS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    # name: (what is there, whether the change waits)
    "nobody looked": (lambda w: busy(w.pod("old"), None), True),
    "busy": (lambda w: busy(w.pod("old"), 3), True),
    "busy for less than that": (lambda w: busy(w.pod("old"), 3, "2026-01-01T11:50:01Z"), True),
    "idle": (lambda w: busy(w.pod("old"), 0), False),
    "busy for too long": (lambda w: busy(w.pod("old"), 3, "2026-01-01T11:50:00Z"), False),
    "no pod serves": (lambda w: busy(w.pod("old", ready=False), None), False),
}


@pytest.mark.parametrize("case", WAITS.values(), ids=WAITS)
def test_a_change_waits_for_a_moment_without_requests(world: Any, case: tuple[Callable[[Any], Any], bool]) -> None:
    arrange, waits = case
    there = changed(arrange(world(rollout={"waitForIdle": "10m"})))
    assert bool(written(there, "Deployment")) is not waits
    assert there.plan().asks_load is (waits and there.load is None)
    assert (ready(there).reason == "WaitingForIdle") is waits
    if waits:
        earlier = (there.service.status.get("revisions") or {}).get("waitingSince")
        assert there.status()["revisions"]["waitingSince"] == (earlier or "2026-01-01T12:00:00Z")
        assert there.plan().requeue_after == 5
    else:
        assert "waitingSince" not in there.status()["revisions"]


def test_idleness_is_asked_for_changes_alone(world: Any) -> None:
    assert world(rollout={"waitForIdle": "10m"}).pod().plan().asks_load is False
    assert changed(world().pod()).plan().asks_load is False


def test_scaling_does_not_wait_for_idle_pods(world: Any) -> None:
    there = busy(changed(world(rollout={"waitForIdle": "10m"}, replicas=3).pod()), 5)
    there.record("new", 1, served=True)
    there.children["Deployment", "demo"]["spec"]["replicas"] = 1
    [deployment] = written(there, "Deployment")
    assert deployment["spec"]["replicas"] == 3
    assert "--seed" not in str(deployment["spec"]["template"])


def other_model(there: Any) -> Any:
    """The spec asks for a model whose volume is not there yet."""
    there.service = replace(there.service, model=replace(there.service.model, revision="v2"))
    return there


SUSPENSIONS: dict[str, tuple[Object, Callable[[Any], Any], int | None, str]] = {
    # name: (spec, what is there with 2 pods of the Deployment, replicas written, Ready's reason)
    "while serving": ({"suspend": True}, lambda w: w, 0, "RollingOut"),
    "during a rollout": ({"suspend": True}, changed, 0, "RollingOut"),
    "during a prefetch": ({"suspend": True}, other_model, 0, "CreatingVolume"),
    "resumed during a prefetch": ({"replicas": 3}, other_model, 3, "CreatingVolume"),
    "nothing to follow": ({"replicas": 2}, other_model, None, "CreatingVolume"),
    "while it waits": (
        {"suspend": True, "rollout": {"waitForIdle": "1h"}},
        lambda w: changed(busy(w, 3)),
        0,
        "RollingOut",
    ),
    "while paused": ({"suspend": True, "rollout": {"paused": True}}, lambda w: w, 0, "RollingOut"),
}


@pytest.mark.parametrize("case", SUSPENSIONS.values(), ids=SUSPENSIONS)
def test_suspend_is_followed_at_once(world: Any, case: tuple[Object, Callable[[Any], Any], int | None, str]) -> None:
    spec, arrange, replicas, reason = case
    there = world(**spec).pod().pod().record("new", 1, served=True)
    there.children["Deployment", "demo"]["spec"]["replicas"] = 2
    arrange(there)
    found = written(there, "Deployment")
    assert [item["spec"]["replicas"] for item in found] == ([] if replicas is None else [replicas])
    assert ready(there).reason == reason
    if there.service.model.revision == "v2" and found:
        # What runs is what was recorded: a resumption starts the old revision, not a mixture.
        assert found[0]["spec"]["template"] == there.revisions[0]["data"]["template"]


def test_a_held_revision_without_a_record_is_taken_from_the_deployment(world: Any) -> None:
    there = other_model(world(suspend=True).pod())
    deployment = there.children["Deployment", "demo"]
    deployment["spec"]["replicas"] = 1
    [held] = written(there, "Deployment")
    assert held["spec"]["template"] == deployment["spec"]["template"]
    assert held["spec"]["strategy"] == deployment["spec"]["strategy"]


def test_a_model_that_does_not_fit_is_no_reason_to_keep_pods_that_are_suspended(world: Any) -> None:
    there = world(suspend=True, resources={"gpus": 1, "gpuProducts": ["Tesla-T4"]}).pod()
    there.children["Deployment", "demo"]["spec"]["replicas"] = 1
    there.service = replace(there.service, status={"model": there.service.status["model"] | {"bytes": 60 * 10**9}})
    [held] = written(there, "Deployment")
    assert held["spec"]["replicas"] == 0
    assert ready(there).reason == "DoesNotFit"


def test_a_suspended_service_says_what_still_ends(world: Any) -> None:
    there = world(suspend=True).record("new", 1, served=True)
    there.pods.append({"metadata": {"name": "gone", "labels": {}, "deletionTimestamp": "t"}, "status": {}})
    assert ready(there).reason == "Suspended"
    assert "1 pod finishes its requests and ends" in ready(there).message


def test_no_revision_is_given_up_while_suspended(world: Any) -> None:
    there = late(world(suspend=True).record("new", 2).record("good", 1, key="good", served=True))
    assert ready(there).reason == "Suspended"
    assert not [item for item in written(there, "ControllerRevision") if "stoker.dev/failed" in str(item)]


def test_a_paused_change_waits_and_says_so(world: Any) -> None:
    there = world(rollout={"paused": True}).pod("new").record("new", 1, key="old", served=True).answered()
    assert not written(there, "ControllerRevision")
    found = {item.type: item for item in there.plan().conditions}
    assert found["Ready"].reason == "RolloutPaused"
    assert (found["Stalled"].status, found["Reconciling"].status) == ("False", "False")
    same = world(rollout={"paused": True}).pod("new").record("new", 1, served=True).answered()
    assert ready(same).reason == "Serving"
