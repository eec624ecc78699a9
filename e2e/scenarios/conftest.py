"""One cluster for all scenarios, with a hub and the chart in it; one namespace for each scenario."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
from e2e.cluster.backend import Given, cluster
from e2e.cluster.binaries import Say, ensure, to_stderr
from e2e.cluster.layout import NO_CLUSTER
from e2e.cluster.processes import NodeStartError
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, proxied


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run `install` and `newcomer` first: they begin and end with a cluster in which nothing of Stoker is."""
    items.sort(key=lambda item: item.path.parent.name not in ("install", "newcomer"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where a run has an end, what would begin too late for it is skipped."""
    if time.time() > float(os.environ.get("STOKER_E2E_UNTIL", "inf")):
        pytest.skip("no time is left for it in this run")


def entered(stack: ExitStack, say: Say) -> Given:
    """Enter a cluster; a run that has an end ends here, with a status of its own, where the machine carries no node."""
    try:
        return stack.enter_context(cluster(say))
    except NodeStartError as error:
        if "STOKER_E2E_UNTIL" not in os.environ:
            raise
        pytest.exit(f"no cluster could be made: {error}", returncode=NO_CLUSTER)


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Say:
    """Shows a line at once, past pytest's capture of what tests print."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            to_stderr(text)

    return show


@pytest.fixture(scope="session")
def given(say: Say) -> Iterator[Given]:
    """A cluster with the images in it; SIGTERM ends the run as Ctrl-C does, so that nothing stays."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            yield entered(stack, say)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def kube(given: Given) -> Iterator[Kube]:
    """kubectl and helm for it."""
    tools = ensure(["kubectl", "helm"])
    made = Kube(given.kubeconfig, str(tools["kubectl"]), str(tools["helm"]))
    if given.node is not None:
        yield made
        return
    with proxied(made) as reached:
        yield reached


@pytest.fixture
def only_node(kube: Kube) -> str:
    """The name of the cluster's one node, for what is done to the node on which it all runs."""
    names = [str(node["metadata"]["name"]) for node in kube.items("nodes")]
    if len(names) != 1:
        pytest.skip(f"needs a cluster of one node; this one has {len(names)}")
    return names[0]


@pytest.fixture(scope="session")
def hub(kube: Kube, given: Given) -> Iterator[stoker.Hub]:
    """A hub with SmolLM2, reachable from pods."""
    more = "--repo=acme/another=/models"  # the same weights under a name of their own
    with stoker.namespace(kube, stoker.HUB_NAMESPACE) as place, stoker.hub(place, given.images, "hub", more) as running:
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


@pytest.fixture(scope="module")
def activator(installed: Kube) -> Iterator[None]:
    """What holds requests, switched on by an upgrade, as a person would, and off again for the other scenarios."""
    stoker.upgrade(installed, "activator.enabled=true")
    yield
    stoker.upgrade(installed, "activator.enabled=false")


@pytest.fixture
def place(request: pytest.FixtureRequest, kube: Kube, installed: Kube, hub: stoker.Hub) -> Iterator[Kube]:
    """A namespace of this test's own; the hub is whole again afterwards."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    with stoker.namespace(kube, name) as made:
        try:
            yield made
        finally:
            hub.faults()
