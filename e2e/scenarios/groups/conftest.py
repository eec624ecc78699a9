"""LeaderWorkerSets, which a cluster has by an installation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.groups import CRDS, Publisher
from e2e.scenarios.kube import Kube


@pytest.fixture
def install_groups(kube: Kube, place: Kube, given: Given) -> Iterator[Callable[[], None]]:
    """Brings them to the cluster when it is called, for one test; one that has them is left alone."""
    if kube.find(*CRDS[0].split("/")) is not None:
        yield lambda: None
        return
    if given.node is None:
        pytest.skip("needs LeaderWorkerSet in the cluster, or a node on this machine to bring it to")
    node = given.node
    publisher = Publisher(node.layout.data / "lws", kube.kubeconfig, node.processes)
    try:
        yield publisher.install
        # Its pods go with it, for which its controller is still there.
        place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
    finally:
        publisher.remove()
