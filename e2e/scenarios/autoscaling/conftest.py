"""KEDA, which a cluster has by an installation of its own, and the Prometheus that it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.keda import PROMETHEUS_URL, Publisher
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube

# The chart's switch for what holds requests; the other scenarios go without.
from e2e.scenarios.scale_to_zero.conftest import activator  # noqa: F401

SCALED_OBJECTS = "crd", "scaledobjects.keda.sh"


@pytest.fixture
def install_keda(kube: Kube, place: Kube, installed: Kube, given: Given) -> Iterator[Callable[[], None]]:
    """Brings both to the cluster when it is called, for one test, and tells the chart where Prometheus is."""
    if given.node is None or kube.find(*SCALED_OBJECTS) is not None:
        pytest.skip("needs a node on this machine, without KEDA, to bring it and its Prometheus to")
    node = given.node
    publisher = Publisher(node.layout.data / "keda", kube.kubeconfig, node.processes)

    def told(url: str) -> None:
        settings = ("--reuse-values", f"--set=prometheus.url={url}")
        installed.helm("upgrade", "stoker", str(stoker.CHART), *settings, "--wait", "--timeout=180s")

    def install() -> None:
        publisher.install()
        told(PROMETHEUS_URL)

    try:
        yield install
        # What KEDA is to let go of goes while it is still there.
        place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
    finally:
        publisher.remove()
        told("")
