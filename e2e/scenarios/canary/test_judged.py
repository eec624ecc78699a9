"""Scenario 15, what is judged: requests that fail, and streams that are slow; and other weights, which are good.

Clients here take a refusal: it is what they are there for.
"""

from __future__ import annotations

import re
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.canary.test_canary import JUDGED, SPEED_IS_NOTHING, gone, serving, try_out
from e2e.scenarios.canary.traffic import Way, lives
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.person import plugin_of
from e2e.scenarios.streams import streaming

ANOTHER = {"uri": "hf://acme/another", "files": {"allow": ["SmolLM2-135M-Instruct.Q4_1.gguf"]}}


@contextmanager
def asking(base: str, clients: int, tokens: int) -> Iterator[list[int]]:
    """Clients that ask one thing after the other, refused or not; the status of each answer."""
    found: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                stoker.ask(base, "model", tokens=tokens)
                found.append(200)
            except urllib.error.HTTPError as error:
                found.append(error.code)
                stop.wait(0.2)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def failed_canary(place: Kube, way: Way) -> dict[str, Any]:
    """status.canary once it was taken back, stable pods as they were and the service Ready."""
    found = way.until("Failed", 400)
    eventually("its pods are gone", lambda: gone(place), 240)
    conditions = stoker.conditions(place, "model")
    assert (conditions["Canary"]["status"], conditions["Canary"]["reason"]) == ("False", "CanaryFailed")
    assert conditions["Ready"]["status"] == "True"
    assert lives(place) == way.before
    return found


def test_one_whose_requests_fail_is_taken_back(place: Kube, say: Say) -> None:
    """Its queue is full with one request, so others are refused (429); the stable pod takes all."""
    way = serving(place)
    with asking(stoker.url(place, "model"), clients=8, tokens=24) as statuses:
        watch = stoker.Stopwatch()
        runtime = {"maxConcurrency": 1, "args": ["--max-queued", "1"]}
        try_out(place, steps=[50], runtime=runtime, window="60s", tolerance=SPEED_IS_NOTHING | {"errors": 5})
        found = failed_canary(place, way)
        refused = f"{statuses.count(429)} of {len(statuses)} requests were refused"
        say(f"canary: one that refuses was taken back after {watch.seconds:.0f} s, {refused}")
        before = len(statuses)
        eventually("the stable pod answers", lambda: len(statuses) > before + 10, 120)
    assert re.match(r"\d+ of its \d+ requests failed \(\S+ %\), of the stable revision's 0\.0 %$", found["why"]), found
    assert found["canary"]["failed"] >= 3
    assert found["stable"]["failed"] == 0
    assert set(statuses) == {200, 429}
    assert set(statuses[before + 5 :]) == {200}


def test_one_whose_streams_are_slow_is_taken_back(place: Kube, say: Say) -> None:
    """It computes in 32 bits, and attends by the reference."""
    way = serving(place)
    tolerance = {"firstToken": 10000, "tokens": 15}
    with streaming(stoker.url(place, "model"), "model", clients=4, tokens=32) as streams:
        streams.wait_running(2)
        watch = stoker.Stopwatch()
        runtime = {"args": ["--dtype", "float32", "--kernel", "paged_attention=reference"]}
        try_out(place, steps=[50], runtime=runtime, window="30s", tolerance=tolerance)
        found = failed_canary(place, way)
        say(f"canary: one of slow streams was taken back after {watch.seconds:.0f} s, {streams.whole} were whole")
        streams.wait_more(4)
    assert re.match(r"its streams had \S+ tokens a second, the stable revision's \S+$", found["why"]), found
    mine, stable = found["canary"], found["stable"]
    assert mine["tokensPerSecond"] < 0.85 * stable["tokensPerSecond"]
    assert min(mine["requests"], stable["requests"]) >= JUDGED["requests"]
    assert (mine["failed"], stable["failed"]) == (0, 0)


def test_other_weights_that_are_good_become_the_model(place: Kube, say: Say, tmp_path: Any) -> None:
    """They are fetched while the stable pods serve, go to all pods, and into the spec without a rollout."""
    way = serving(place)
    with streaming(stoker.url(place, "model"), "model", clients=4, tokens=8) as streams:
        streams.wait_running(4)
        watch = stoker.Stopwatch()
        try_out(place, steps=[50], model=ANOTHER)
        way.until("Promoted", 600)
        say(f"canary: other weights in all pods after {watch.seconds:.0f} s, {streams.whole} streams were whole")
        eventually("its own pods are gone", lambda: gone(place), 240)
        streams.wait_more(4)
    assert [station for station in way.stations if station[0] == "Running"] == [("Running", 1)]
    assert place.get("infsvc", "model")["spec"]["model"]["uri"] != ANOTHER["uri"], "the spec is its owner's"
    stoker.wait_ready(place, "model")
    after = lives(place)
    plugin_of(place, tmp_path)("promote", "model", "--spec")
    spec = place.get("infsvc", "model")["spec"]
    assert "canary" not in spec
    assert spec["model"]["uri"] == ANOTHER["uri"]
    stoker.wait_ready(place, "model")
    assert lives(place) == after, "what moved into the spec rolled pods out"
