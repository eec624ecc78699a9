"""Scenario 3: with 20 streams running, a rolling update, a deleted pod and a drained node cut none and lose none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming


@pytest.fixture
def uncordoned(kube: Kube, only_node: str) -> Iterator[str]:
    """The name of the node on which it all runs; it takes pods again at the end."""
    yield only_node
    kube.kubectl("uncordon", only_node)


def names(kube: Kube) -> set[str]:
    return {pod["metadata"]["name"] for pod in stoker.engine_pods(kube, "model")}


def all_names(kube: Kube) -> set[str]:
    """Also of those that terminate."""
    return {pod["metadata"]["name"] for pod in kube.items("pods", "app.kubernetes.io/component=engine")}


@pytest.mark.ci
def test_rolling_update(place: Kube) -> None:
    place.apply(stoker.service("model"))
    stoker.wait_ready(place, "model")
    old = names(place)
    with streaming(stoker.url(place, "model"), "model") as streams:
        streams.wait_running(20)
        place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--log-level", "warning"]}}})
        stoker.wait_ready(place, "model")
        eventually("the old pods are gone", lambda: not all_names(place) & old, 180)
        streams.wait_more(20)
    assert names(place).isdisjoint(old)


def test_deleted_pod(place: Kube) -> None:
    place.apply(stoker.service("model", replicas=2))
    stoker.wait_ready(place, "model")
    victim = sorted(names(place))[0]
    with streaming(stoker.url(place, "model"), "model") as streams:
        streams.wait_running(20)
        place.kubectl("delete", "pod", victim, "--wait=false")
        eventually("the pod is gone", lambda: victim not in all_names(place), 180)
        stoker.wait_ready(place, "model")
        streams.wait_more(20)


def test_drained_node(place: Kube, uncordoned: str) -> None:
    """The budget lets one pod go at a time; the other serves until a third is ready."""
    place.apply(stoker.service("model", replicas=2))
    stoker.wait_ready(place, "model")
    old = names(place)
    with streaming(stoker.url(place, "model"), "model") as streams:
        streams.wait_running(20)
        selector = "--pod-selector=app.kubernetes.io/instance=model"
        drain = place.start("drain", uncordoned, selector, "--delete-emptydir-data", "--timeout=400s")
        try:
            eventually("one pod is evicted", lambda: len(all_names(place) & old) == 1, 180)
            waits = eventually("a pod waits for a node", lambda: _unschedulable(place), 60)
            assert "placement" in waits or "cordoned" in waits or "node" in waits
            place.kubectl("uncordon", uncordoned)
            output, _ = drain.communicate(timeout=400)
        finally:
            drain.kill()
        assert drain.returncode == 0, output
        stoker.wait_ready(place, "model")
        streams.wait_more(20)
    assert names(place).isdisjoint(old)


def _unschedulable(kube: Kube) -> str:
    scheduled = stoker.conditions(kube, "model").get("Scheduled", {})
    return str(scheduled["message"]) if scheduled.get("status") == "False" else ""
