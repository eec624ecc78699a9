"""plan/rollout.py: how a change goes about GPUs, what is recorded of a revision, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.plan.changes import changed, ready, written

from stoker_operator.plan.actions import Delete

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
LATE = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}]


@pytest.fixture
def world(world: Any) -> Any:
    """As everywhere, with no revision recorded yet."""

    def build(**spec: Any) -> Any:
        there = world(**spec)
        there.revisions.clear()
        return there

    return build


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
    there.weights(60 * 10**9)
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
