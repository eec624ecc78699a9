"""plugin/sleep.py: the verbs with a real kubectl and API server while an operator reconciles; the steps they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.plugin.conftest import Plugin
from tests.operator.reconcile.kubelet import Node
from tests.operator.reconcile.sleeping import SCALING, clock, gauges, reconciler, until

from stoker_operator.manifests.activation import ASLEEP, AWAKE, WAKING
from stoker_operator.plugin import cli
from stoker_operator.plugin import sleep as sleeps
from stoker_operator.plugin.errors import PluginError

__all__ = ["clock", "gauges", "reconciler", "until"]
Object = dict[str, Any]


@pytest.mark.apiserver
async def test_wake_and_sleep_ask_the_operator_and_wait(
    stoker: Plugin,
    serve: Callable[..., Any],
    until: Callable[..., Any],
    node: Node,
    gauges: dict[str, float],
) -> None:
    await serve("demo", autoscaling=SCALING)
    gauges["stoker:idle_seconds"] = 3
    sleeping = asyncio.create_task(asyncio.to_thread(stoker, "sleep", "demo"))
    await until(ASLEEP)
    done = await sleeping
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "demo: asked to sleep"
    assert done.stdout.splitlines()[-1] == "Asleep: a request wakes it"
    assert (
        "to do      by choice; a request wakes it, and so does kubectl stoker wake demo"
        in stoker("status", "demo").stdout
    )
    waking = asyncio.create_task(asyncio.to_thread(stoker, "wake", "demo", "--for", "3h"))
    await until(WAKING)
    await node.run_all(1)
    awake = await until(AWAKE)
    done = await waking
    assert done.returncode == 0, done.stderr
    assert f"Awake until {awake['status']['sleep']['until']} at least" in done.stdout.splitlines()[-1]
    shown = stoker("status", "demo").stdout
    assert "it was wished: wake for 3h at " in shown
    assert f"awake until {awake['status']['sleep']['until']} at least" in " ".join(shown.split())


@pytest.mark.apiserver
async def test_who_has_no_sleep_is_not_woken(stoker: Plugin, create: Callable[..., Any]) -> None:
    found = await create("demo")
    done = stoker("wake", "demo")
    assert done.returncode == 1
    assert "demo runs its pods all the time: spec.autoscaling says no scaleToZero" in done.stderr
    assert "stoker.dev/wish" not in found["metadata"].get("annotations", {})


def service(
    state: str, wish: str, *, ready: str = "False", asked: str = "", said: str = "Awake", **sleep: Any
) -> Object:
    conditions = [
        {"type": "Ready", "status": ready, "reason": "x", "message": ""},
        {"type": "ScaleToZero", "status": "True", "reason": said, "message": "Pods run."},
    ]
    status = {"sleep": {"state": state, "wish": wish} | sleep, "conditions": conditions}
    head = {"name": "demo", "annotations": {"stoker.dev/wish": asked or "W"}}
    return {"metadata": head, "spec": {"autoscaling": {"min": 0, "scaleToZero": {}}}, "status": status}


def told(*seen: Object, wakes: bool = True, timeout: float = 60) -> list[str]:
    looks = iter(seen)
    return list(sleeps.steps(lambda: next(looks), "W", wakes, timeout))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeps, "EVERY_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_each_step_is_told_once() -> None:
    loads = {"step": "the engine loads the model"}
    lines = told(
        service("Asleep", "older"),
        service("Waking", "W", step="a pod waits for a node", etaSeconds=17),
        service("Waking", "W", step="a pod waits for a node", etaSeconds=16),
        service("Waking", "W", etaSeconds=9, **loads),
        service("Waking", "W", etaSeconds=0, **loads),
        service("Awake", "W", until="2026-05-05T07:00:00Z"),
        service("Awake", "W", until="2026-05-05T07:00:00Z", ready="True"),
    )
    assert lines == [
        "Asleep: a request wakes it",
        "Waking: a pod waits for a node, about 17 s to go",
        "Waking: the engine loads the model, about 9 s to go",
        "Waking: the engine loads the model",
        "Awake until 2026-05-05T07:00:00Z at least, then until nobody asks",
    ]


@pytest.mark.usefixtures("at_once")
def test_an_earlier_sleep_is_not_the_one_that_was_asked_for() -> None:
    asleep = service("Asleep", "W", wakesAt="2026-05-05T07:00:00Z")
    lines = told(service("Asleep", "older"), service("Awake", "older"), asleep, wakes=False)
    assert lines[-2:] == ["Awake: Pods run.", "Asleep: a request wakes it, and its schedule at 2026-05-05T07:00:00Z"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (service("Awake", "W", asked="another"), "somebody else asked for something else"),
        (service("Asleep", "", said="WishUnknown"), "Pods run."),
        (service("Asleep", "W"), "that is not so after 0 s"),
    ],
)
def test_what_cannot_come_is_said(seen: Object, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        told(seen, seen, timeout=0)


def test_what_would_do_nothing_is_refused_before_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    suspended = service("Awake", "")
    suspended["spec"]["suspend"] = True
    off = service("Awake", "")
    off["status"]["conditions"][1] |= {"status": "False", "message": "The chart's activator.enabled is off."}
    for refused, words in ((suspended, "spec.suspend of demo is true"), (off, "cannot sleep: The chart's activator")):
        with pytest.raises(PluginError, match=words):
            sleeps.check(refused)
    for verb in ("wake", "sleep"):
        assert cli.main([verb, "demo", "--up"]) == 1
        assert "a `stoker up` has no activator, so its pods run all the time" in capsys.readouterr().err
    assert cli.main(["wake", "demo", "--for", "1d"]) == 1
    assert "--for '1d' is not a duration such as 45m or 8h" in capsys.readouterr().err
