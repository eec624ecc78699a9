"""KEDA, which a cluster has by an installation of its own, and the Prometheus that it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.keda import PROMETHEUS_URL, Publisher
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube

SCALED_OBJECTS = "crd", "scaledobjects.keda.sh"


@pytest.fixture
def install_keda(kube: Kube, place: Kube, installed: Kube, given: Given) -> Iterator[Callable[[], None]]:
    """Brings both to the cluster when it is called, for one test, and tells the chart where Prometheus is."""
    if given.node is None or kube.find(*SCALED_OBJECTS) is not None:
        pytest.skip("needs a node on this machine, without KEDA, to bring it and its Prometheus to")
    node = given.node
    publisher = Publisher(node.layout.data / "keda", kube.kubeconfig, node.processes)

    def install() -> None:
        publisher.install()
        stoker.upgrade(installed, f"prometheus.url={PROMETHEUS_URL}")

    try:
        yield install
        # What KEDA is to let go of goes while it is still there.
        place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
    finally:
        publisher.remove()
        stoker.upgrade(installed, "prometheus.url=")
