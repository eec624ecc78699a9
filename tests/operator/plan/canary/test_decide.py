"""decide.py: a canary's pods and share, its steps, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.plan.changes import written

from stoker_operator import manifests
from stoker_operator.observe.comparison import Comparison, Figures
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import Answer, Beside
from stoker_operator.plan.actions import Condition, Delete
from stoker_operator.spec.service import InferenceService

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
ROUTE = {"httpRoute": {"parentRefs": [{"name": "gw"}]}}
STEPS = {"steps": [10, 40], "window": "1m", "requests": 5, "runtime": {"args": ["--seed", "9"]}}
FINE = Figures(40, 0, 0.1, 30.0)


@pytest.fixture
def settled(world: Any) -> Callable[..., Any]:
    """A service that serves, with a canary; `state` is what its status says of that, None = nothing yet."""

    def build(state: str | None = None, *, step: int = 1, replicas: int = 3, **spec: Any) -> Any:
        there = world(**({"canary": STEPS, "replicas": replicas} | spec)).answered()
        for _ in range(replicas):
            there.pod()
        # What was there before there was a canary.
        status = there.service.status | {"revisions": {"answered": "new", "rolledOut": "new", "generation": 1}}
        if state is not None:
            key = manifests.canary_key(there.service)
            known = {"key": key, "name": f"{key}-1", "state": state, "since": "2026-01-01T11:00:00Z", "step": step}
            status["canary"] = known | {"answered": "other"}
        there.service = replace(there.service, status=status)
        return there

    return build


def running(there: Any, pods: int = 1, *, ready: int | None = None, compared: Comparison | None = None) -> Any:
    """The canary's Deployment, and so many pods of it."""
    service: InferenceService = manifests.as_served(there.service)
    made = manifests.canary_deployment(service, there.settings, there.model, pods)
    front = manifests.canary_service(service)
    for item in (made, front):
        there.children[item["kind"], item["metadata"]["name"]] = there.live(item)
    there.children["Deployment", "demo-canary"]["status"] = {"observedGeneration": 1}
    up = pods if ready is None else ready
    state = Rollout(desired=pods, total=pods, ready=up, updated=pods, updated_ready=up, current="other", number=1)
    there.beside = Beside(rollout=state, answer=Answer("c0", "other", ""), comparison=compared)
    return there


def compared(canary: Figures = FINE, *, stable: Figures = FINE, seconds: int = 3600) -> Comparison:
    return Comparison(NOW - timedelta(seconds=seconds), stable, canary)


def said(there: Any) -> Condition:
    return next(item for item in there.plan().conditions if item.type == "Canary")


def state(there: Any) -> str:
    return str(there.plan().canary.status["state"])


def ended(there: Any) -> list[str]:
    return [f"{action.kind} {action.name}" for action in there.plan().actions if isinstance(action, Delete)]


def test_it_comes_beside_the_stable_pods_which_nothing_is_written_of(settled: Any) -> None:
    there = settled()
    [made] = written(there, "Deployment")
    assert made["metadata"]["name"] == "demo-canary"
    stable = there.children["Deployment", "demo"]["spec"]
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert not stable["selector"]["matchLabels"].items() <= labels.items()
    assert not made["spec"]["selector"]["matchLabels"].items() <= stable["template"]["metadata"]["labels"].items()
    assert "--seed" in str(made)
    assert [item["metadata"]["name"] for item in written(there, "Service")] == ["demo-canary"]
    ready = next(item for item in there.plan().conditions if item.type == "Ready")
    assert ready.status == "True"


def test_without_a_stable_revision_that_serves_there_is_none(settled: Any) -> None:
    there = settled()
    there.pods.pop()
    assert not written(there, "Deployment")
    assert said(there).reason == "CanaryWaiting"
    assert ended(running(settled(suspend=True))) == ["Deployment demo-canary", "Service demo-canary"]


PODS: dict[str, tuple[int, int, Object, int]] = {
    # name: (stable pods, percent, endpoint, pods of the canary)
    "a tenth of nine": (9, 10, {}, 1),
    "a quarter of twelve": (12, 25, {}, 4),
    "less than one": (2, 1, {}, 1),
    "never more than the stable ones": (2, 90, {}, 2),
    "a route gives any share to one pod": (9, 10, ROUTE, 1),
    "enough to carry it": (9, 34, ROUTE, 4),
}


@pytest.mark.parametrize("case", PODS.values(), ids=PODS)
def test_it_has_as_many_pods_as_make_or_carry_the_share(settled: Any, case: tuple[int, int, Object, int]) -> None:
    replicas, weight, endpoint, wanted = case
    canary = {"weight": weight, "runtime": {"args": ["--seed", "9"]}}
    there = settled(replicas=replicas, canary=canary, endpoint=endpoint)
    there.served = frozenset({"HTTPRoute"})
    [made] = written(there, "Deployment")
    assert made["spec"]["replicas"] == wanted


def test_clients_are_led_to_it_once_it_answered(settled: Any) -> None:
    there = running(settled("Starting"))
    there.beside = replace(there.beside, answer=Answer("c0", "other", "it is broken"))
    there.service = replace(there.service, status=there.service.status | {"canary": {}})
    assert not written(there, "Service")
    assert "it is broken" in said(there).message
    there = running(settled("Starting"))
    [front] = written(there, "Service")
    pod = there.children["Deployment", "demo-canary"]["spec"]["template"]["metadata"]["labels"]
    assert front["spec"]["selector"].items() <= pod.items()
    assert said(there).message.startswith("Step 1 of 2. 1 pod beside 3 stable ones have 25 % of the connections, where")


def test_a_route_gives_exactly_the_share(settled: Any) -> None:
    there = running(settled("Running", endpoint=ROUTE, step=2), pods=2, compared=compared(seconds=1))
    there.served = frozenset({"HTTPRoute"})
    [route] = written(there, "HTTPRoute")
    [rule] = route["spec"]["rules"]
    assert [(item["name"], item["weight"]) for item in rule["backendRefs"]] == [("demo", 60), ("demo-canary", 40)]
    assert not [item for item in written(there, "Service") if item["metadata"]["name"] == "demo"]
    there = running(settled("Running", endpoint=ROUTE), ready=0)
    there.served = frozenset({"HTTPRoute"})
    [rule] = written(there, "HTTPRoute")[0]["spec"]["rules"]
    assert [item["name"] for item in rule["backendRefs"]] == ["demo"]


STEPPED: dict[str, tuple[str, int, Comparison, str, int]] = {
    # name: (state, step, figures, state after it, step after it)
    "nobody knows yet": ("Running", 1, compared(seconds=10), "Running", 1),
    "good": ("Running", 1, compared(), "Running", 2),
    "good at the last one": ("Running", 2, compared(), "Promoting", 2),
    "idle": ("Running", 2, compared(Figures()), "Running", 2),
    "bad": ("Running", 2, compared(Figures(40, 20)), "Failed", 2),
}


@pytest.mark.parametrize("case", STEPPED.values(), ids=STEPPED)
def test_it_goes_from_step_to_step(settled: Any, case: tuple[str, int, Comparison, str, int]) -> None:
    before, step, figures, after, at = case
    there = running(settled(before, step=step), pods=step, compared=figures)
    found = there.plan().canary.status
    assert (found["state"], found["step"]) == (after, at)
    assert bool(ended(there)) is (after == "Failed")


def test_by_what_one_was_judged_can_be_read_afterwards(settled: Any) -> None:
    bad = Figures(57, 23, first_token=0.31)
    there = running(settled("Running", step=2), pods=2, compared=compared(bad))
    told = there.plan().canary.status
    assert (told["state"], told["canary"]["failed"], told["stable"]["failed"]) == ("Failed", 23, 0)
    there.service = replace(there.service, status=there.service.status | {"canary": told})
    there.beside = Beside()
    assert there.plan().canary.status == told


def test_a_step_is_not_judged_by_the_pods_of_the_one_before(settled: Any) -> None:
    there = running(settled("Running", step=2), pods=1)
    assert [item["spec"]["replicas"] for item in written(there, "Deployment")] == [2]
    assert not there.plan().canary.mark, "a comparison begins before the pods of the step are there"
    assert "1 of 2 are ready" in said(there).message
    assert state(running(settled("Running", step=2), pods=1, compared=compared())) == "Running"
    assert running(settled("Running", step=2), pods=2).plan().canary.mark


@pytest.mark.parametrize(("seconds", "again"), [(40, 10), (600, 30), (86400, 60)])
def test_one_that_stands_for_long_is_looked_at_more_rarely(settled: Any, seconds: int, again: float) -> None:
    """Each look at one that has requests writes its figures."""
    canary = {**{key: value for key, value in STEPS.items() if key != "steps"}, "weight": 10}
    there = running(settled("Passed", canary=canary), compared=compared(seconds=seconds))
    assert there.plan().canary.again == again


def test_a_weight_waits_for_a_person_and_is_judged_on(settled: Any) -> None:
    canary = STEPS | {"weight": 10}
    canary.pop("steps")
    there = running(settled("Running", canary=canary), compared=compared())
    assert state(there) == "Passed"
    assert (said(there).status, said(there).reason) == ("True", "CanaryPassed")
    there = running(settled("Passed", canary=canary), compared=compared(Figures(40, 20)))
    assert state(there) == "Failed"


PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}
DIED = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T11:30:00Z", "message": "CUDA error"}}
BROKEN: dict[str, tuple[str, int, Object, bool, bool]] = {
    # name: (state, age of the pod, of its container, whether its Deployment is late, whether it is given up)
    "it cannot run": ("Starting", 91, {"state": PULL}, False, True),
    "it may pass by itself": ("Starting", 30, {"state": PULL}, False, False),
    "it is late": ("Starting", 30, {"state": {"running": {}}}, True, True),
    "it began anew before it served": ("Starting", 30, {"lastState": DIED, "ready": True}, False, False),
    "it began anew while it served": ("Running", 30, {"lastState": DIED, "ready": True}, False, True),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_one_that_does_not_run_is_taken_back(settled: Any, case: tuple[str, int, Object, bool, bool]) -> None:
    before, age, container, late, given_up = case
    there = running(settled(before), ready=0)
    made = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    pod = {"metadata": {"name": "c0", "creationTimestamp": made}, "spec": {"containers": []},
           "status": {"containerStatuses": [{"name": "engine", "image": "i"} | container]}}  # fmt: skip
    late_state = replace(there.beside.rollout, deadline_exceeded=late, failed="timed out" if late else "")
    there.beside = replace(there.beside, pods=(pod,), rollout=late_state)
    assert (state(there) == "Failed") is given_up
    assert bool(ended(there)) is given_up
    assert not [item for item in written(there, "Deployment") if item["metadata"]["name"] == "demo"]


def wishing(there: Any, wish: str) -> Any:
    there.service = replace(there.service, canary_wish=wish.replace("IT", f"{manifests.canary_key(there.service)}-1"))
    return there


WISHES: dict[str, tuple[str, str, str]] = {
    "promote": ("Running", "promote IT", "Promoting"),
    "abort": ("Running", "abort IT", "Aborted"),
    "of another trial": ("Running", "promote IT0", "Running"),
    "what failed is not promoted": ("Failed", "promote IT", "Failed"),
    "back after all": ("Promoted", "abort IT", "Returning"),
}


@pytest.mark.parametrize("case", WISHES.values(), ids=WISHES)
def test_a_persons_wish_is_done(settled: Any, case: tuple[str, str, str]) -> None:
    before, wish, after = case
    assert state(wishing(running(settled(before), compared=compared(seconds=1)), wish)) == after


def test_promoted_all_pods_become_what_the_spec_would_make_of_it(settled: Any, service: Any) -> None:
    """So that moving it into the spec changes no pod, and nobody waits for a turn."""
    there = settled("Promoting")
    [made] = [item for item in written(there, "Deployment") if item["metadata"]["name"] == "demo"]
    moved = service(replicas=3, runtime={"args": ["--seed", "9"]})
    wanted = manifests.engine_template(moved, there.settings, there.model)
    assert made["spec"]["template"] == wanted
    assert state(there) == "Promoting"
    assert not ended(running(there)), "its own pods go on meanwhile"


def test_promoted_it_is_once_all_pods_are(settled: Any) -> None:
    there = settled("Promoting")
    [made] = [item for item in written(there, "Deployment") if item["metadata"]["name"] == "demo"]
    live = there.live(made) | {"status": {"observedGeneration": 1}}
    live["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "1"}
    there.children["Deployment", "demo"] = live
    running(there, compared=compared())
    there.children["Deployment", "demo"]["status"]["conditions"] = [
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    ]
    there.revisions.clear()
    assert state(there) == "Promoted"
    assert ended(there) == ["Deployment demo-canary", "Service demo-canary"]
    asked = there.service
    there.service = manifests.as_served(asked)
    there.record("good", 0, key="good", served=True).record("new", 1)
    there.service = asked
    for pod in there.pods:
        pod["status"]["conditions"][0]["status"] = "False"
    assert state(there) == "Failed", "its rollout to all pods failed"


def test_what_the_spec_says_already_needs_no_pods(settled: Any) -> None:
    there = running(settled(runtime={"args": ["--seed", "9"]}))
    assert (state(there), said(there).reason) == ("InSpec", "CanaryInSpec")
    assert ended(there) == ["Deployment demo-canary", "Service demo-canary"]
    plain = running(settled())
    plain.service = replace(plain.service, canary=None)
    assert ended(plain) == ["Deployment demo-canary", "Service demo-canary"]
    assert not [item for item in plain.plan().conditions if item.type == "Canary"]
