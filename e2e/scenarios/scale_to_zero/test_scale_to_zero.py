"""Scenario 12: a service without pods answers. Requests are held while a pod starts; none is lost and none runs twice.

The number of sleeps under trickling clients is STOKER_E2E_SLEEPS, 2 unless it is set; 50 take three quarters of an
hour.
"""

from __future__ import annotations

import os
import random
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.faults.test_operator_killed import kill_leader, wait_whole
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.scale_to_zero.clients import Asking, Engines

pytestmark = pytest.mark.usefixtures("activator")
SLEEPS = int(os.environ.get("STOKER_E2E_SLEEPS", "2"))
BATCH = 8
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
    asked = asking.send()
    eventually("it says that it wakes", lambda: state(place)["state"] == "Waking", 60, every=0.2)
    seen = state(place)
    assert seen["why"] == "POST /v1/completions", "one of the probes woke it"
    assert {"step", "etaSeconds"} <= seen.keys()
    asking.wait()
    say(f"{engine}: a held request was answered after {asked.answered - asked.sent:.1f} s")
    stoker.wait_reason(place, "model", "Serving")
    eventually("the activator is off the way", lambda: state(place)["state"] == "Awake", 60)
    assert not place.get("endpointslice", "model-activator").get("endpoints")
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
        eventually("the log tells of all", lambda: sum(engines.begun.values()) >= 100, 60)
    assert set(engines.begun.values()) == {1}, "a request ran twice"
    ended = sorted(asking.all, key=lambda asked: asked.answered)
    places = {asked.id: at for at, asked in enumerate(ended)}
    moved = {at: places[asked.id] for at, asked in enumerate(asking.all) if abs(at - places[asked.id]) > 2 * BATCH}
    say(f"100 held requests: the last answer {ended[-1].answered - asking.all[0].sent:.1f} s after the first request, "
        f"{100 - len(moved)} of them within {2 * BATCH} places of their own")  # fmt: skip
    # Two proxies lie between a client and the activator: a packet that is sent again costs a second of fifty requests.
    assert len(moved) <= 3, f"requests were not answered in the order of their arrival: {moved}"


def test_nothing_is_lost_while_it_sleeps_and_wakes_and_operators_die(place: Kube, installed: Kube, say: Say) -> None:
    """Requests come at random moments of its falling asleep, sleeping and waking."""
    choose = random.Random()
    place.apply(sleeper("model"))
    stoker.wait_ready(place, "model")
    asking, killed = Asking(stoker.url(place, "model"), "model"), 0
    with Engines.followed(place, "model") as engines:
        eventually("the log of the first pod is read", lambda: engines.pods == 1, 60)
        while engines.pods <= SLEEPS:
            pause = choose.uniform(6.0, 16.0)
            time.sleep(pause)
            for _ in range(choose.randint(1, 4)):
                asking.send(stream=choose.random() < 0.5)
                time.sleep(choose.uniform(0.0, 0.3))
            if choose.random() < 0.4:
                kill_leader(installed)
                killed += 1
            asking.wait()
        wait_whole(installed)
        eventually("it sleeps when nobody asks", asleep(place), 180)
        eventually("the log tells of all", lambda: sum(engines.begun.values()) >= len(asking.all), 60)
    twice = [name for name, times in engines.begun.items() if times > 1]
    say(f"{len(asking.all)} requests through {engines.pods - 1} sleeps, the operator killed {killed} times: "
        f"0 lost, {len(twice)} duplicated")  # fmt: skip
    assert not twice
