"""decide.py: the steps to sleep and back, each by what makes it, and what may not make it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator.manifests.activation import (
    ASLEEP,
    AWAKE,
    FALLING,
    WAKING,
    Bounds,
    Sleep,
    activator_slice,
    read_bounds,
    read_sleep,
    slice_addresses,
    slice_port,
)
from stoker_operator.observe.snapshot import Idle
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.settings import Settings
from stoker_operator.spec.sleeping import Hours
from stoker_operator.status.status import from_plan

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SLICE = ("EndpointSlice", "demo-activator")
SCALING = {"min": 0, "max": 3, "scaleToZero": {"idleAfter": "7m", "maxQueued": 9, "maxWait": "4m"}}
NAME = "2026-01-01T11:59:00.000+00:00"


class Story:
    """A service that serves, and may sleep; `act` carries a plan out as the API server and controllers would."""

    def __init__(self, world: Any, *, engine: str = "HPA", **spec: Any) -> None:
        self.there = world(autoscaling=SCALING | {"engine": engine}, **spec).pod().answered()
        self.there.activators, self.there.port = ("10.0.0.7", "10.0.0.8"), 20417
        ready = {"type": "Ready", "status": "True", "observedGeneration": 1, "reason": "Serving", "message": ""}
        self.status(conditions=[ready | {"lastTransitionTime": "2026-01-01T00:00:00Z"}])
        self.now = NOW

    def status(self, **more: Any) -> None:
        self.there.service = replace(self.there.service, status=dict(self.there.service.status) | more)

    def asks(self, wish: str) -> Story:
        """People annotate the object."""
        self.there.service = replace(self.there.service, wish=wish)
        return self

    def keeps(self, *hours: Hours) -> Story:
        """The spec has a schedule."""
        scaling = self.there.service.autoscaling
        zero = replace(scaling.scale_to_zero, schedule=hours)
        self.there.service = replace(self.there.service, autoscaling=replace(scaling, scale_to_zero=zero))
        return self

    def sleep(self) -> Sleep:
        """What the slice notes."""
        return read_sleep(self.there.children[SLICE])

    def sleeps(self, state: str, *, since: datetime = NOW, **more: Any) -> Story:
        """The slice notes that it stands there."""
        sleep = Sleep(state, NAME, since.strftime("%Y-%m-%dT%H:%M:%SZ"), "nobody asked", **more)
        bounds = Bounds(9, 240, 60, False, ("demo",))
        manifest = activator_slice(self.there.service, sleep, bounds, 20417, "10.0.0.8")
        self.there.children[SLICE] = self.there.live(manifest)
        if state in (ASLEEP, WAKING):
            self.replicas(0)
            self.there.pods.clear()
        return self

    def replicas(self, number: int, by: str = "stoker-operator") -> None:
        deployment = self.there.children["Deployment", "demo"]
        deployment["spec"]["replicas"] = number
        deployment["metadata"]["managedFields"] = [{"manager": by, "fieldsV1": {"f:spec": {"f:replicas": {}}}}]

    def plan(self) -> Plan:
        return make_plan(self.there.service, self.there.observed(), self.there.settings, self.now)

    def state(self) -> str:
        return self.plan().sleep.state

    def act(self) -> Plan:
        plan = self.plan()
        for action in plan.actions:
            if isinstance(action, Apply):
                manifest = action.manifest
                key = (manifest["kind"], manifest["metadata"]["name"])
                if manifest["kind"] == "Deployment":
                    if "replicas" in manifest["spec"]:
                        self.replicas(manifest["spec"]["replicas"])
                        self.there.children[key]["metadata"]["annotations"] |= manifest["metadata"]["annotations"]
                else:
                    self.there.children[key] = self.there.live(manifest)
        return plan

    def deployed(self, plan: Plan) -> int | None:
        """The number that a plan writes into the Deployment; None, it writes none."""
        for action in plan.actions:
            if isinstance(action, Apply) and action.manifest["kind"] == "Deployment":
                return action.manifest["spec"].get("replicas")  # type: ignore[no-any-return]
        return None


@pytest.fixture
def story(world: Any) -> Callable[..., Story]:
    return lambda **spec: Story(world, **spec)


Tell = Callable[..., Story]


def test_the_slice_says_what_the_activator_needs(story: Tell) -> None:
    told = story(endpoint={"auth": {"apiKeysSecretRef": {"name": "keys"}}})
    told.status(startup={"scheduleSeconds": 2, "loadSeconds": 31})
    told.act()
    live = told.there.children[SLICE]
    assert read_bounds(live) == Bounds(9, 240, 34, True, ("demo",))
    assert (slice_port(live), live["addressType"]) == (20417, "IPv4")
    assert slice_addresses(live) == (), "nobody is led to the activator while pods run"
    assert live["metadata"]["labels"]["kubernetes.io/service-name"] == "demo"
    assert not told.plan().actions, "a second reconcile finds nothing to do"


def test_from_serving_to_sleep_and_back(story: Tell) -> None:
    told = story()
    told.act()
    told.there.idle = Idle(421.0)
    assert told.act().sleep.state == FALLING
    assert slice_addresses(told.there.children[SLICE]) != ()
    assert told.deployed(told.plan()) is None, "pods go when every node knows the other way"
    told.now += timedelta(seconds=4)
    assert told.deployed(told.plan()) is None
    told.now += timedelta(seconds=2)
    assert told.deployed(told.act()) == 0
    told.there.pods.clear()
    plan = told.act()
    assert (plan.sleep.state, told.deployed(plan)) == (ASLEEP, None)
    assert next(item.reason for item in plan.conditions if item.type == "Ready") == "Asleep"
    assert not told.plan().actions
    told.now += timedelta(hours=5)
    told.status(wake={"sleep": read_sleep(told.there.children[SLICE]).name, "by": "POST /v1/embeddings"})
    plan = told.act()
    assert (plan.sleep.state, told.deployed(plan)) == (WAKING, 1)
    assert read_sleep(told.there.children[SLICE]).why == "POST /v1/embeddings"
    told.there.pod(ready=False)
    assert told.act().sleep.state == WAKING
    told.there.pods.clear()
    told.there.pod()
    told.act()
    assert slice_addresses(told.there.children[SLICE]) != (), "not every node may know the pod yet"
    told.now += timedelta(seconds=6)
    assert told.act().sleep.state == AWAKE
    assert slice_addresses(told.there.children[SLICE]) == ()


STAYS: dict[str, Callable[[Story], object]] = {
    "a request runs": lambda told: setattr(told.there, "idle", Idle(0.0)),
    "not for long enough": lambda told: setattr(told.there, "idle", Idle(419.0)),
    "a pod does not say": lambda told: setattr(told.there, "idle", Idle(0.0, "pod p0 does not say")),
    "a pod starts": lambda told: told.there.pod(ready=False),
    "it was not said to be ready": lambda told: told.status(conditions=[]),
    "a pod is silent": lambda told: setattr(told.there, "silent", frozenset({"p0"})),
    "nobody would hold requests": lambda told: setattr(told.there, "activators", ()),
}


@pytest.mark.parametrize("state", [AWAKE, FALLING])
@pytest.mark.parametrize("case", STAYS)
def test_it_stays_awake(story: Tell, case: str, state: str) -> None:
    told = story().sleeps(state, since=NOW - timedelta(minutes=1))
    told.there.idle = Idle(500.0)
    STAYS[case](told)
    plan = told.plan()
    assert plan.sleep.state == AWAKE
    assert told.deployed(plan) is None


def test_who_is_awake_is_looked_at_when_it_may_sleep(story: Tell) -> None:
    told = story()
    assert told.plan().sleep.asks_idle
    told.there.idle = Idle(400.0)
    assert told.plan().requeue_after == 20.0


@pytest.mark.parametrize(
    ("wake", "state"),
    [({"sleep": NAME, "by": "a"}, WAKING), ({"sleep": "2025-01-01T00:00:00.000+00:00"}, ASLEEP), ({}, ASLEEP)],
)
def test_only_this_sleep_is_ended(story: Tell, wake: Object, state: str) -> None:
    told = story().sleeps(ASLEEP)
    told.status(wake=wake)
    assert told.state() == state


@pytest.mark.parametrize("engine", ["HPA", "KEDA", "External"])
def test_the_scale_wakes(story: Tell, engine: str) -> None:
    told = story(engine=engine).sleeps(ASLEEP)
    told.replicas(2, by="kubectl")
    plan = told.plan()
    assert plan.sleep.state == WAKING
    assert told.deployed(plan) is None, "what was asked for is left"


def test_the_scale_puts_to_sleep(story: Tell) -> None:
    told = story().sleeps(AWAKE)
    told.replicas(0, by="kubectl")
    assert told.state() == ASLEEP


def test_an_external_scaler_wakes_and_puts_to_sleep(story: Tell) -> None:
    told = story(engine="External", replicas=0)
    told.there.idle = Idle(0.4)
    assert told.plan().sleep.state == FALLING, "0 is asked for, so nobody waits for longer than for the requests"
    told = story(engine="External", replicas=2).sleeps(ASLEEP, replicas=2)
    assert told.state() == ASLEEP, "it fell asleep with this number"
    told = story(engine="External", replicas=2).sleeps(ASLEEP, replicas=0)
    plan = told.plan()
    assert (plan.sleep.state, told.deployed(plan)) == (WAKING, 2)


def test_an_autoscaler_rests_while_it_sleeps_and_has_one_pod_at_least_while_not(story: Tell) -> None:
    told = story(engine="KEDA").sleeps(ASLEEP)
    told.there.served, told.there.settings = frozenset({"ScaledObject"}), Settings(prometheus_url="http://prom")

    def scaled(told: Story) -> Object:
        return next(dict(a.manifest) for a in told.plan().actions if a.event[1].startswith("Created ScaledObject"))

    assert scaled(told)["metadata"]["annotations"]["autoscaling.keda.sh/paused"] == "true"
    assert scaled(told)["spec"]["minReplicaCount"] == 1
    told.sleeps(WAKING)
    assert "autoscaling.keda.sh/paused" not in scaled(told)["metadata"]["annotations"]
    told = story().sleeps(ASLEEP)
    [scaler] = [a.manifest for a in told.plan().actions if a.event[1].startswith("Created HorizontalPodAutoscaler")]
    assert scaler["spec"]["minReplicas"] == 1


def said(told: Story) -> Object:
    """status.sleep of the next plan."""
    plan = told.plan()
    return dict(from_plan(told.there.service, told.there.observed(), plan, told.now)["sleep"])


def test_a_wish_wakes_once_and_keeps_awake_for_as_long_as_it_says(story: Tell) -> None:
    told = story().sleeps(ASLEEP).asks("wake for 2h at 5-o-clock")
    plan = told.act()
    assert (plan.sleep.state, told.deployed(plan)) == (WAKING, 1)
    told.there.pods.clear()
    told.there.pod()
    told.there.idle = Idle(4000.0)
    for _ in range(2):
        told.act()
        told.now += timedelta(seconds=6)
    assert told.act().sleep.state == AWAKE
    assert said(told)["until"] == "2026-01-01T14:00:00Z"
    assert "it was wished: wake for 2h" in said(told)["why"]
    assert not told.plan().actions
    told.now = NOW + timedelta(hours=2)
    assert told.act().sleep.state == FALLING, "the same words are no new wish"
    told.asks("wake at 7-o-clock")
    assert told.act().sleep.state == WAKING
    assert told.sleep().until == "2026-01-01T14:07:00Z", "as long as after a request"


def test_a_wish_to_sleep_waits_for_requests_alone(story: Tell) -> None:
    told = story().asks("wake for 3h")
    told.act()
    told.asks("sleep")
    told.there.idle = Idle(0.0)
    assert told.act().sleep.state == AWAKE
    condition = next(item for item in told.plan().conditions if item.type == "ScaleToZero")
    assert condition.message == "Pods run until none of them has a request: it was wished: sleep."
    told.there.idle = Idle(0.3)
    assert told.act().sleep.state == FALLING
    told.there.idle = Idle(0.0)
    assert told.act().sleep.state == AWAKE, "a request came, and the wish still stands"
    told.there.idle = Idle(0.3)
    told.act()
    told.now += timedelta(seconds=6)
    assert told.deployed(told.act()) == 0
    told.there.pods.clear()
    assert told.act().sleep.state == ASLEEP
    assert told.sleep().wish == "sleep"
    told.replicas(1, by="kubectl")
    told.act()
    told.there.pod()
    for _ in range(2):
        told.act()
        told.now += timedelta(seconds=6)
    assert told.act().sleep.state == AWAKE, "the wish is carried out"


@pytest.mark.parametrize("wish", ["wkae", "wake for 1d", "sleep for 1h", "wake for 169h", "wake at a b"])
def test_a_wish_that_says_nothing_is_named(story: Tell, wish: str) -> None:
    plan = story().sleeps(ASLEEP).asks(wish).plan()
    assert plan.sleep.state == ASLEEP
    condition = next(item for item in plan.conditions if item.type == "ScaleToZero")
    assert (condition.status, condition.reason) == ("Unknown", "WishUnknown")
    assert repr(wish) in condition.message


NOON = Hours("30 12 * * *", "15 13 * * *", "UTC", 2)


@pytest.mark.parametrize("engine", ["HPA", "KEDA", "External"])
def test_a_schedule_wakes_it_and_lets_it_sleep(story: Tell, engine: str) -> None:
    least = 1 if engine == "External" else 2
    told = story(engine=engine).keeps(replace(NOON, least=least)).sleeps(ASLEEP)
    told.there.served, told.there.settings = frozenset({"ScaledObject"}), Settings(prometheus_url="http://prom")
    assert said(told)["wakesAt"] == "2026-01-01T12:30:00Z"
    assert told.plan().requeue_after == 1800.0
    told.now = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    plan = told.act()
    assert (plan.sleep.state, told.deployed(plan)) == (WAKING, least)
    scalers = [
        each for (kind, _), each in told.there.children.items() if kind in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    assert [each["spec"].get("minReplicas") or each["spec"]["minReplicaCount"] for each in scalers] == [2] * len(
        scalers
    )
    assert len(scalers) == (engine != "External")
    told.there.pods.clear()
    told.there.pod()
    if least == 2:
        told.there.pod()
    told.there.idle = Idle(9999.0)
    for _ in range(2):
        told.act()
        told.now += timedelta(seconds=6)
    told.act()
    assert said(told)["state"] == AWAKE
    assert said(told)["until"] == "2026-01-01T13:15:00Z"
    assert "until 2026-01-01 13:15 (UTC)" in said(told)["why"]
    told.now = datetime(2026, 1, 1, 13, 15, tzinfo=UTC)
    assert told.act().sleep.state == FALLING


def test_who_puts_it_to_sleep_is_not_overruled_by_the_schedule(story: Tell) -> None:
    told = story().keeps(replace(NOON, start="30 11 * * *"))
    told.act()
    told.asks("sleep")
    told.there.idle = Idle(1.0)
    assert told.act().sleep.state == FALLING
    told.now += timedelta(seconds=6)
    told.act()
    told.there.pods.clear()
    assert told.act().sleep.state == ASLEEP
    told.now += timedelta(minutes=30)
    assert told.act().sleep.state == ASLEEP
    assert said(told)["wakesAt"] == "2026-01-02T11:30:00Z"
    told.now = datetime(2026, 1, 2, 11, 30, tzinfo=UTC)
    assert told.act().sleep.state == WAKING
    told = story().keeps(replace(NOON, start="30 11 * * *")).sleeps(AWAKE)
    told.replicas(0, by="kubectl")
    assert told.act().sleep.state == ASLEEP
    assert told.act().sleep.state == ASLEEP, "scaled to 0 by hand, it was told so as well"


def test_a_suspended_service_holds_nothing_and_comes_back_awake(story: Tell) -> None:
    told = story(suspend=True).sleeps(ASLEEP)
    assert told.act().sleep.state == AWAKE
    assert slice_addresses(told.there.children[SLICE]) == ()
    told.there.service = replace(told.there.service, suspend=False)
    plan = told.plan()
    assert (plan.sleep.state, told.deployed(plan)) == (AWAKE, 1)


def test_without_the_activator_pods_run(story: Tell) -> None:
    told = story().sleeps(ASLEEP)
    told.there.without = frozenset({"EndpointSlice"})
    told.there.children.pop(SLICE)
    plan = told.plan()
    said = next(item for item in plan.conditions if item.type == "ScaleToZero")
    assert (said.status, said.reason) == ("False", "ActivatorOff")
    assert told.deployed(plan) == 1


def test_while_no_activator_is_ready_what_sleeps_goes_on_sleeping(story: Tell) -> None:
    told = story().sleeps(ASLEEP)
    told.there.activators = ()
    plan = told.plan()
    assert plan.sleep.state == ASLEEP
    said = {item.type: (item.status, item.reason) for item in plan.conditions}
    assert said["ScaleToZero"] == ("False", "NoActivator")
    assert said["EndpointReady"] == ("False", "NoPodReady")


def test_the_one_who_holds_keeps_them_until_he_is_gone(story: Tell) -> None:
    told = story().sleeps(ASLEEP)
    assert not told.plan().actions or slice_addresses(told.there.children[SLICE]) == ("10.0.0.8",)
    told.there.activators = ("10.0.0.7", "10.0.0.9")
    told.act()
    [held] = slice_addresses(told.there.children[SLICE])
    assert held in ("10.0.0.7", "10.0.0.9")


def test_when_the_spec_says_so_no_more_the_slice_goes_once_a_pod_is_ready(story: Tell) -> None:
    told = story().sleeps(ASLEEP)
    scaling = told.there.service.autoscaling
    told.there.service = replace(told.there.service, autoscaling=replace(scaling, least=1, scale_to_zero=None))
    assert not [a for a in told.plan().actions if isinstance(a, Delete)]
    assert told.deployed(told.plan()) == 1
    told.there.pod()
    assert [a.name for a in told.plan().actions if isinstance(a, Delete)] == ["demo-activator"]


@pytest.mark.parametrize("changes", [{"replicas": 0}, {"suspend": True}])
def test_when_no_pod_is_to_come_the_slice_goes_at_once(story: Tell, changes: Object) -> None:
    """What it held nobody would answer."""
    told = story(engine="External").sleeps(ASLEEP)
    scaling = replace(told.there.service.autoscaling, least=1, scale_to_zero=None)
    told.there.service = replace(told.there.service, autoscaling=scaling, **changes)
    assert [a.name for a in told.plan().actions if isinstance(a, Delete)] == ["demo-activator"]


def test_at_no_moment_is_there_nobody_to_take_a_request(story: Tell) -> None:
    """Random histories: idle and busy pods, wishes, scales by hand, an operator that comes late."""
    for seed in range(8):
        choose = random.Random(seed)
        told = story(engine=choose.choice(["HPA", "External"]))
        for _ in range(40):
            event = choose.choice(["time", "time", "idle", "busy", "wish", "scale", "pods", "pods"])
            if event == "time":
                told.now += timedelta(seconds=choose.choice([1, 4, 30, 600]))
            elif event in ("idle", "busy"):
                told.there.idle = Idle(1000.0 if event == "idle" else 0.0)
            elif event == "wish" and SLICE in told.there.children:
                told.status(wake={"sleep": read_sleep(told.there.children[SLICE]).name, "by": "POST /"})
            elif event == "scale":
                told.replicas(choose.choice([0, 1, 2]), by="kubectl")
            elif event == "pods":
                wanted = told.there.children["Deployment", "demo"]["spec"]["replicas"]
                told.there.pods.clear()
                for _ in range(wanted):
                    told.there.pod(ready=choose.random() < 0.7)
            before = told.there.children["Deployment", "demo"]["spec"]["replicas"]
            plan = told.act()
            after = told.there.children["Deployment", "demo"]["spec"]["replicas"]
            if after == 0 and SLICE in told.there.children:
                assert slice_addresses(told.there.children[SLICE]), f"seed {seed}: no pods, and nobody holds requests"
            if before and not after:
                assert told.there.idle is not None, f"seed {seed}: pods went though nobody looked"
                assert told.there.idle.seconds >= 420, f"seed {seed}: a busy pod went"
            assert plan.sleep.state in (AWAKE, FALLING, ASLEEP, WAKING)
