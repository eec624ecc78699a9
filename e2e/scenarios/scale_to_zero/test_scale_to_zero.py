"""Scenario 12: a service without pods answers. Requests are held while a pod starts; none is lost and none runs twice.

Under trickling clients STOKER_E2E_SLEEPERS services (1 unless it is set) sleep and wake, STOKER_E2E_SLEEPS times in all
(2); 50 sleeps of one service take three quarters of an hour.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.faults.test_operator_killed import kill_leader, wait_whole
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.person import plugin_of
from e2e.scenarios.scale_to_zero.clients import Asking, Engines
from e2e.scenarios.scale_to_zero.timeline import Timeline

pytestmark = pytest.mark.usefixtures("activator")
SLEEPS = int(os.environ.get("STOKER_E2E_SLEEPS", "2"))
SLEEPERS = int(os.environ.get("STOKER_E2E_SLEEPERS", "1"))
BATCH = 8
# Of a held request's time what is not the engine's start: operator, scheduler, kubelet, its probe, the way there and
# back. 2.1 to 3.6 s were seen, the most at a load average of 15 on two cores.
OWN_SECONDS = 8.0
SCALING: dict[str, Any] = {"min": 0, "max": 1, "scaleToZero": {"idleAfter": "3s", "maxQueued": 100, "maxWait": "3m"}}


def sleeper(name: str, **autoscaling: Any) -> dict[str, Any]:
    runtime = {"maxConcurrency": BATCH, "args": ["--enable-log-requests"]}
    return stoker.service(name, autoscaling=SCALING | autoscaling, runtime=runtime, drain={"preStop": "2s"})


def state(kube: Kube, name: str = "model") -> dict[str, Any]:
    """status.sleep."""
    return dict(kube.get("infsvc", name)["status"].get("sleep") or {})


def asleep(kube: Kube, name: str = "model") -> Callable[[], bool]:
    """Whether it sleeps and no pod of it is left, going ones included."""

    def look() -> bool:
        pods = kube.items("pods", f"app.kubernetes.io/component=engine,app.kubernetes.io/instance={name}")
        return not pods and stoker.conditions(kube, name)["Ready"]["reason"] == "Asleep"

    return look


def activator_gone(kube: Kube) -> Callable[[], bool]:
    """Whether nobody is led to the activator."""
    return lambda: not kube.get("endpointslice", "model-activator").get("endpoints")


def ready_line(kube: Kube) -> str:
    """What the engine says of the phases of its start."""
    (pod,) = stoker.engine_pods(kube, "model")
    found = re.search(r"ready in .*(?=; serving)", kube.kubectl("logs", pod["metadata"]["name"], "-c", "engine"))
    return found[0] if found else ""


def start_seconds(line: str) -> float:
    """How old the engine was when it was ready, by what it says."""
    found = re.match(r"ready in ([0-9.]+) s", line)
    assert found, f"the engine does not say how long it took to start: {line!r}"
    return float(found[1])


def displaced(asking: Asking, order: list[str]) -> dict[int, int]:
    """The requests that stand more than two batches from the place in which they were sent: place sent → found."""
    places = {request: at for at, request in enumerate(order)}
    found = {at: places[asked.id] for at, asked in enumerate(asking.all)}
    return {at: there for at, there in found.items() if abs(at - there) > 2 * BATCH}


def cluster_time(kube: Kube) -> datetime:
    """What the API server says that it is now."""
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "clock"}})
    made = str(kube.get("configmap", "clock")["metadata"]["creationTimestamp"])
    kube.kubectl("delete", "configmap", "clock")
    return datetime.fromisoformat(made)


def fetch(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.status)


@pytest.mark.parametrize("engine", ["HPA", "External"])
def test_a_request_wakes_and_a_probe_does_not(place: Kube, say: Say, engine: str) -> None:
    # Long enough to see it awake before it falls asleep again.
    place.apply(sleeper("model", engine=engine, scaleToZero=SCALING["scaleToZero"] | {"idleAfter": "20s"}))
    stoker.wait_ready(place, "model")
    eventually("it sleeps", asleep(place), 120)
    assert stoker.conditions(place, "model")["EndpointReady"]["reason"] == "Held"
    base = stoker.url(place, "model")
    for path in ("/health", "/metrics", "/version", "/v1/models"):
        assert fetch(base + path) == 200
    asking = Asking(base, "model")
    with Timeline.followed(place, "model") as timeline:
        asked = asking.send()
        timeline.begin(asked.sent)
        eventually("it says that it wakes", lambda: state(place)["state"] == "Waking", 60, every=0.2)
        seen = state(place)
        assert seen["why"] == "POST /v1/completions", "one of the probes woke it"
        assert {"step", "etaSeconds"} <= seen.keys()
        asking.wait()
        line, total = ready_line(place), asked.answered - asked.sent
        say(f"{engine}: a held request was answered after {total:.1f} s: {timeline.told(asked.answered)}; {line}")
        own = total - start_seconds(line)
        assert own < OWN_SECONDS, f"{own:.1f} s of it were not the engine's start"
    stoker.wait_reason(place, "model", "Serving")
    eventually("the activator is off the way", lambda: state(place)["state"] == "Awake", 60)
    assert activator_gone(place)()
    eventually("it sleeps again", asleep(place), 120)
    place.kubectl("scale", "deployment", "model", "--replicas=1")
    stoker.wait_reason(place, "model", "Serving")
    assert asking.all[0].error == ""


def test_a_hundred_held_requests_are_answered_in_their_order(place: Kube, say: Say) -> None:
    place.apply(sleeper("model"))
    stoker.wait_ready(place, "model")
    eventually("it sleeps", asleep(place), 120)
    asking = Asking(stoker.url(place, "model"), "model")
    with Engines.followed(place, "model") as engines:
        for number in range(100):
            asking.send(stream=number % 3 == 0)
            time.sleep(0.02)
        asking.wait()
        eventually("the log tells of all", all_told(asking, engines), 60)
    assert set(engines.begun.values()) == {1}, "a request ran twice"
    ended = sorted(asking.all, key=lambda asked: asked.answered)
    moved = displaced(asking, [asked.id for asked in ended])
    (received,) = engines.order.values()
    overtaken = displaced(asking, received)
    say(f"100 held requests: the last answer {ended[-1].answered - asking.all[0].sent:.1f} s after the first request, "
        f"{100 - len(moved)} of them within {2 * BATCH} places of their own")  # fmt: skip
    # Two proxies lie between a client and the activator: a packet that is sent again costs a second of fifty requests.
    assert len(overtaken) <= 3, f"the engine did not get requests in the order of their arrival: {overtaken}"
    assert len(moved) <= 3, f"requests were not answered in the order of their arrival: {moved}"


def test_more_than_may_wait_are_told_when_to_come_again(place: Kube) -> None:
    place.apply(sleeper("model", scaleToZero=SCALING["scaleToZero"] | {"maxQueued": 3}))
    stoker.wait_ready(place, "model")
    eventually("it sleeps", asleep(place), 120)
    asking = Asking(stoker.url(place, "model"), "model")
    for _ in range(5):
        asking.send()
        time.sleep(0.2)  # so that they arrive in this order, and long before a pod can be there
    asking.end()
    held, turned = asking.all[:3], asking.all[3:]
    assert [asked.status for asked in asking.all] == [200, 200, 200, 429, 429], [asked.error for asked in asking.all]
    assert not any(asked.error for asked in held)
    assert all(int(asked.retry_after) >= 1 for asked in turned)
    assert max(asked.answered for asked in turned) < min(asked.answered for asked in held), "they were held, too"


def test_who_waited_as_long_as_may_be_is_told_when_to_come_again(place: Kube) -> None:
    """While no pod can be made, for a quota."""
    place.apply(sleeper("model", scaleToZero=SCALING["scaleToZero"] | {"maxWait": "9s"}))
    stoker.wait_ready(place, "model")
    eventually("it sleeps", asleep(place), 120)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    place.apply(quota)
    place.wait("jsonpath={.status.hard.pods}=0", "resourcequota/none", 60)
    asking = Asking(stoker.url(place, "model"), "model")
    asked = asking.send()
    asking.end()
    assert (asked.status, '"expired"' in asked.error) == (503, True), asked.error
    assert int(asked.retry_after) >= 1
    assert 9 <= asked.answered - asked.sent < 9 + OWN_SECONDS
    assert not stoker.engine_pods(place, "model")
    assert state(place)["state"] == "Waking"
    place.kubectl("delete", "resourcequota", "none")
    place.merge("infsvc", "model", {"spec": {"autoscaling": {"scaleToZero": {"maxWait": "3m"}}}})
    stoker.wait_reason(place, "model", "Serving")
    asking.send()
    asking.end()
    assert [bool(each.error) for each in asking.all] == [True, False], asking.all[-1].error


def test_its_schedule_wakes_it_and_lets_it_sleep_again(place: Kube, say: Say) -> None:
    """Nobody asks. A schedule knows minutes, so the hours are the next but one minute and the two after it."""
    place.apply(sleeper("model"))
    stoker.wait_ready(place, "model")
    eventually("it sleeps", asleep(place), 120)
    begins = cluster_time(place).replace(second=0) + timedelta(minutes=2)
    ends = begins + timedelta(minutes=3)
    hours = {edge: f"{at.minute} {at.hour} * * *" for edge, at in (("start", begins), ("end", ends))}
    place.merge("infsvc", "model", {"spec": {"autoscaling": {"scaleToZero": {"schedule": [hours]}}}})
    told = f"{begins:%Y-%m-%dT%H:%M:%SZ}"
    eventually("it says when it wakes", lambda: state(place).get("wakesAt") == told, 60)
    assert asleep(place)(), "it woke before its time"
    eventually("it wakes", lambda: state(place)["state"] == "Waking", 180, every=0.2)
    waking = state(place)
    assert waking["why"].startswith("its schedule has pods run until")
    late = (datetime.fromisoformat(waking["since"]) - begins).total_seconds()
    assert 0 <= late < OWN_SECONDS, f"it woke {late:.0f} s after its time"
    stoker.wait_reason(place, "model", "Serving")
    eventually("the activator is off the way", activator_gone(place), 60)
    eventually("it sleeps again", asleep(place), 300)
    slept = (datetime.fromisoformat(state(place)["since"]) - ends).total_seconds()
    assert slept >= 0, "it fell asleep within its hours"
    say(f"a schedule woke a service {late:.0f} s after its time; it slept {slept:.0f} s after its hours' end")


def test_a_person_puts_it_to_sleep_and_wakes_it(place: Kube, tmp_path: Path) -> None:
    """By `kubectl stoker`: nothing else would within ten minutes."""
    plugin = plugin_of(place, tmp_path)
    place.apply(sleeper("model", scaleToZero=SCALING["scaleToZero"] | {"idleAfter": "10m"}))
    stoker.wait_ready(place, "model")
    told = plugin("sleep", "model", "--timeout", "200")
    assert "model: asked to sleep" in told
    assert told.splitlines()[-1].startswith("Asleep: a request wakes it")
    eventually("its pods are gone", asleep(place), 60)
    told = plugin("wake", "model", "--timeout", "200")
    assert "model: asked to wake" in told
    assert stoker.conditions(place, "model")["Ready"]["reason"] == "Serving"
    assert (state(place)["state"], len(stoker.engine_pods(place, "model"))) == ("Awake", 1)
    eventually("the activator is off the way", activator_gone(place), 60)
    asking = Asking(stoker.url(place, "model"), "model")
    asking.send(tokens=400, stream=True)
    plugin("sleep", "model", "--timeout", "200")
    asking.wait()
    eventually("its pods are gone", asleep(place), 120)
    asking.send()
    asking.wait()


def test_nothing_is_lost_while_it_sleeps_and_wakes_and_operators_die(place: Kube, installed: Kube, say: Say) -> None:
    """Requests come at random moments of a service's falling asleep, sleeping and waking."""
    choose, killed = random.Random(), 0
    names = ["model", *(f"model{number}" for number in range(2, SLEEPERS + 1))]
    each = math.ceil(SLEEPS / SLEEPERS)
    with ExitStack() as stack, ThreadPoolExecutor(SLEEPERS) as pool:
        # From the first pod on: that sleeps before the last service is ready.
        engines = [stack.enter_context(Engines.followed(place, name)) for name in names]
        for name in names:
            place.apply(sleeper(name))
        for name in names:
            eventually(f"{name} serves, or sleeps already", served(place, name), 300)
        assert all(found.pods for found in engines), "the log of a first pod was not read"
        asking = [Asking(stoker.url(place, name), name) for name in names]
        trickling = [pool.submit(trickle, asks, found, each) for asks, found in zip(asking, engines, strict=True)]
        while not all(done.done() for done in trickling):
            time.sleep(choose.uniform(5.0, 40.0))
            killed += kill_whoever_leads(installed)
        for done in trickling:
            done.result()
        wait_whole(installed)
        for name, asks, found in zip(names, asking, engines, strict=True):
            eventually(f"{name} sleeps when nobody asks", asleep(place, name), 180)
            eventually("the log tells of all", all_told(asks, found), 60)
    twice = [request for found in engines for request, times in found.begun.items() if times > 1]
    idle = [pod for found in engines for pod in found.idle]
    requests, sleeps = sum(len(asks.all) for asks in asking), sum(found.pods - 1 for found in engines)
    say(f"{requests} requests through {sleeps} sleeps of {SLEEPERS} services, the operator killed {killed} times: "
        f"0 lost, {len(twice)} duplicated, {len(idle)} pods that nobody needed")  # fmt: skip
    assert not twice
    assert not idle, "pods came that no request had asked for"


def served(kube: Kube, name: str) -> Callable[[], bool]:
    """Whether it has been ready: from then on somebody takes its requests."""
    return lambda: stoker.conditions(kube, name).get("Ready", {}).get("reason") in ("Serving", "Asleep", "Waking")


def all_told(asking: Asking, engines: Engines) -> Callable[[], bool]:
    return lambda: sum(engines.begun.values()) >= len(asking.all)


def trickle(asking: Asking, engines: Engines, sleeps: int) -> None:
    """Ask now and then, until it has slept so often."""
    choose = random.Random()
    while engines.pods <= sleeps:
        time.sleep(choose.uniform(6.0, 16.0))
        for _ in range(choose.randint(1, 4)):
            asking.send(stream=choose.random() < 0.5)
            time.sleep(choose.uniform(0.0, 0.3))
        asking.wait()


def kill_whoever_leads(installed: Kube) -> bool:
    """Kill the leader, unless the one that the Lease names is dead already."""
    leader = installed.get("lease", "stoker")["spec"]["holderIdentity"]
    alive = any(pod["metadata"]["name"] == leader for pod in installed.items("pods"))
    if alive:
        kill_leader(installed)
    return alive
