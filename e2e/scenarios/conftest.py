"""One cluster for all scenarios, with a hub and the chart in it; one namespace for each scenario."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator

import pytest
from e2e.cluster.backend import Given, cluster
from e2e.cluster.binaries import ensure
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, namespace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run `install` first: it begins and ends with a cluster in which nothing of Stoker is."""
    items.sort(key=lambda item: item.path.parent.name != "install")


@pytest.fixture(scope="session")
def given() -> Iterator[Given]:
    """A cluster with the images in it; SIGTERM ends the run as Ctrl-C does, so that nothing stays."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(text: str) -> None:
        sys.__stderr__.write(f"{text}\n") if sys.__stderr__ else None

    try:
        with cluster(say) as made:
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def kube(given: Given) -> Kube:
    """kubectl and helm for it."""
    tools = ensure(["kubectl", "helm"])
    return Kube(given.kubeconfig, str(tools["kubectl"]), str(tools["helm"]))


@pytest.fixture(scope="session")
def hub(kube: Kube, given: Given) -> Iterator[stoker.Hub]:
    """A hub with SmolLM2, reachable from pods."""
    with namespace(kube, stoker.HUB_NAMESPACE) as place, stoker.hub(place, given.images) as running:
        yield running


@pytest.fixture(scope="session")
def installed(kube: Kube, given: Given, hub: stoker.Hub) -> Iterator[Kube]:
    """The chart, installed by helm; the value is the namespace it is in."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": stoker.SYSTEM, "labels": labels}})
    try:
        stoker.install(kube, given.images, hub.endpoint)
        yield kube.within(stoker.SYSTEM)
    finally:
        stoker.uninstall(kube)


@pytest.fixture
def place(request: pytest.FixtureRequest, kube: Kube, installed: Kube, hub: stoker.Hub) -> Iterator[Kube]:
    """A namespace of this test's own; the hub is whole again afterwards."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    with namespace(kube, name) as made:
        try:
            yield made
        finally:
            hub.faults()
