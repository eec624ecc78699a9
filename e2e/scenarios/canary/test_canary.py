"""Scenario 15: a canary by the number of pods. A good one goes to all pods by its steps; a bad one is taken back by
itself, or by a person; meanwhile clients stream, and not one of their requests fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.canary.traffic import Way, canary_pods, lives, stand
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.person import Plugin, plugin_of
from e2e.scenarios.streams import streaming

# Failures decide. How fast pods are that share two cores says nothing of a revision.
SPEED_IS_NOTHING = {"firstToken": 10000, "tokens": 100}
JUDGED = {"window": "10s", "requests": 10, "tolerance": SPEED_IS_NOTHING}
BAD: dict[str, dict[str, Any]] = {
    "flag": {"runtime": {"args": ["--tokenizer", "/no/such/tokenizer"]}},
    "image": {"runtime": {"image": "stoker/no-such-image:1"}},
}
SAID = {"flag": "/no/such/tokenizer", "image": "stoker/no-such-image:1"}


@pytest.fixture
def plugin(place: Kube, tmp_path: Path) -> Plugin:
    return plugin_of(place, tmp_path)


def serving(place: Kube, replicas: int = 1, deadline: str = "10m") -> Way:
    """A service `model` that serves. A `deadline` is short for what is to miss it alone: on a machine that does much
    else, a good pod takes minutes.
    """
    place.apply(stoker.service("model", replicas=replicas, rollout={"progressDeadline": deadline}))
    stoker.wait_ready(place, "model")
    return Way(place, lives(place))


def try_out(place: Kube, **canary: Any) -> None:
    """Put a canary into the spec."""
    place.merge("infsvc", "model", {"spec": {"canary": JUDGED | canary}})


def lengths(place: Kube) -> set[str]:
    """What the stable pods' engines are told of the context."""
    found = set()
    for pod in stoker.engine_pods(place, "model"):
        arguments = pod["spec"]["containers"][0]["args"]
        found.add(next(each.partition("=")[2] or arguments[at + 1] for at, each in enumerate(arguments)
                       if each.startswith("--max-model-len")))  # fmt: skip
    return found


def gone(place: Kube) -> bool:
    return not canary_pods(place) and place.find("deployment", "model-canary") is None


def test_a_good_one_goes_to_all_pods_step_by_step(place: Kube, plugin: Plugin, say: Say) -> None:
    way = serving(place, 2)
    with streaming(stoker.url(place, "model"), "model", clients=4, tokens=8) as streams:
        streams.wait_running(4)
        watch = stoker.Stopwatch()
        try_out(place, steps=[34, 50], runtime={"contextLength": 384})
        way.until("Promoted", 600)
        say(f"canary: two steps and all pods after {watch.seconds:.0f} s, {streams.whole} streams were whole")
        eventually("its own pods are gone", lambda: gone(place), 240)
        streams.wait_more(4)
    assert [station for station in way.stations if station[0] == "Running"] == [("Running", 1), ("Running", 2)]
    assert way.shares == {1: 33, 2: 50}, "pods did not share as they were asked to"
    stoker.wait_ready(place, "model")
    assert lengths(place) == {"384"}
    assert place.get("infsvc", "model")["spec"]["runtime"]["contextLength"] == 512, "the spec is its owner's"
    after = lives(place)
    plugin("promote", "model", "--spec")
    spec = place.get("infsvc", "model")["spec"]
    assert "canary" not in spec
    assert spec["runtime"]["contextLength"] == 384
    stoker.wait_ready(place, "model")
    assert lives(place) == after, "what moved into the spec rolled pods out"


@pytest.mark.parametrize("how", BAD)
def test_a_bad_one_is_taken_back_by_itself(place: Kube, say: Say, how: str) -> None:
    way = serving(place, deadline="60s")
    with streaming(stoker.url(place, "model"), "model", clients=4, tokens=8) as streams:
        streams.wait_running(4)
        watch = stoker.Stopwatch()
        try_out(place, steps=[50], **BAD[how])
        found = way.until("Failed", 400)
        say(f"canary: a bad {how} was taken back after {watch.seconds:.0f} s")
        eventually("its pods are gone", lambda: gone(place), 240)
        streams.wait_more(4)
    assert SAID[how] in found["why"], found
    conditions = stoker.conditions(place, "model")
    assert (conditions["Canary"]["status"], conditions["Canary"]["reason"]) == ("False", "CanaryFailed")
    assert conditions["Ready"]["status"] == "True", "what became of a canary is no trouble of the service's"
    assert lives(place) == way.before


def test_one_that_is_slow_to_its_first_token_is_taken_back(place: Kube, say: Say) -> None:
    """Its pods run one request at a time, so every other one waits for its first token until those before it are over;
    none of them fails, and what streams goes no slower.
    """
    way = serving(place)
    judged = {"window": "25s", "tolerance": {"firstToken": 100, "tokens": 100}}
    with streaming(stoker.url(place, "model"), "model", clients=8, tokens=24) as streams:
        streams.wait_running(4)
        watch = stoker.Stopwatch()
        try_out(place, steps=[50], runtime={"maxConcurrency": 1}, **judged)
        found = way.until("Failed", 400)
        say(f"canary: a slow one was taken back after {watch.seconds:.0f} s, {streams.whole} streams were whole")
        eventually("its pods are gone", lambda: gone(place), 240)
        streams.wait_more(4)
    mine, stable = found["canary"], found["stable"]
    assert re.match(r"its first token took \S+ s on average, the stable revision's \S+ s$", found["why"]), found
    assert mine["firstTokenSeconds"] > 2 * stable["firstTokenSeconds"]
    assert min(mine["requests"], stable["requests"]) >= JUDGED["requests"]
    assert (mine["failed"], stable["failed"]) == (0, 0)
    conditions = stoker.conditions(place, "model")
    assert (conditions["Canary"]["status"], conditions["Canary"]["reason"]) == ("False", "CanaryFailed")
    assert conditions["Ready"]["status"] == "True"
    assert lives(place) == way.before


def test_a_person_promotes_one_and_takes_another_back(place: Kube, plugin: Plugin) -> None:
    way = serving(place)
    with streaming(stoker.url(place, "model"), "model", clients=4, tokens=8) as streams:
        streams.wait_running(4)
        try_out(place, weight=50, runtime={"contextLength": 400})
        found = way.until("Passed")
        assert found["canary"]["requests"] >= JUDGED["requests"]
        assert found["canary"]["failed"] == 0
        plugin("abort", "model")
        way.until("Aborted")
        eventually("its pods are gone", lambda: gone(place), 240)
        assert lives(place) == way.before
        try_out(place, weight=50, runtime={"contextLength": 384})
        Way(place, way.before).until("Running")
        assert "384" not in lengths(place)
        plugin("promote", "model")
        eventually("all pods are what it was", lambda: stand(place)["state"] == "Promoted", 300)
        stoker.wait_ready(place, "model")
        assert lengths(place) == {"384"}
        streams.wait_more(4)


def test_weights_that_are_not_there_harm_nobody(place: Kube, plugin: Plugin) -> None:
    """A canary of another model waits for its weights, says so, and a person takes it back."""
    way = serving(place)

    def said() -> bool:
        return "no-such-branch" in stoker.conditions(place, "model").get("Canary", {}).get("message", "")

    with streaming(stoker.url(place, "model"), "model", clients=2, tokens=8) as streams:
        streams.wait_running(2)
        try_out(place, steps=[50], model={"revision": "no-such-branch"})
        eventually("its condition names the revision", said, 180)
        plugin("abort", "model")
        way.until("Aborted")
        streams.wait_more(2)
    assert not canary_pods(place)
    assert stoker.conditions(place, "model")["Ready"]["status"] == "True"
    assert lives(place) == way.before
