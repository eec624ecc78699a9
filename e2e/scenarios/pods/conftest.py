"""What admits pods, gives them devices and makes groups of them, which a cluster has by installations of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.devices import Driver
from e2e.cluster.kueue import CRD, Publisher
from e2e.scenarios.gpus.conftest import gpus as gpus
from e2e.scenarios.groups.conftest import install_groups as install_groups
from e2e.scenarios.kube import Kube, eventually

_API = "kueue.x-k8s.io/v1beta2"


@pytest.fixture
def give_devices(place: Kube, given: Given) -> Iterator[Callable[[int], None]]:
    """Brings a driver with so many devices to the node when it is called, for one test."""
    if given.node is None:
        pytest.skip("needs a node on this machine to bring a driver of devices to")
    driver = Driver(given.node)
    try:
        yield driver.start
        # The kubelet asks the driver before a pod may go.
        place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
        eventually("no claim is held", lambda: not place.items("pods"), 120)
    finally:
        driver.stop()


@dataclass(frozen=True)
class Queue:
    """A queue of a namespace, and the quota behind it."""

    kube: Kube
    name: str = "team"

    def make(self, gpus: int) -> None:
        """Have the queue, with room for so many GPUs and for more of everything else than the node has."""
        plenty = {"cpu": "100", "memory": "1000Gi", "ephemeral-storage": "1000Gi"}
        quota = [{"name": kind, "nominalQuota": size} for kind, size in {**plenty, "nvidia.com/gpu": gpus}.items()]
        flavor = {"name": self.name, "resources": quota}
        group = {"coveredResources": [each["name"] for each in quota], "flavors": [flavor]}
        self.kube.apply(
            self._object("ResourceFlavor", {}),
            self._object("ClusterQueue", {"namespaceSelector": {}, "resourceGroups": [group]}),
            self._object("LocalQueue", {"clusterQueue": self.name}),
        )

    def remove(self) -> None:
        """Kueue lets go of them once nothing is admitted by them."""
        for kind in ("localqueue", "clusterqueue", "resourceflavor"):
            self.kube.kubectl("delete", kind, self.name, "--ignore-not-found", "--timeout=60s")

    def _object(self, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": _API, "kind": kind, "metadata": {"name": self.name}, "spec": spec}


@pytest.fixture
def queue(kube: Kube, place: Kube, given: Given) -> Iterator[Queue]:
    """Kueue in the cluster for one test, and a queue of it in the test's namespace."""
    if given.node is None or kube.find(*CRD) is not None:
        pytest.skip("needs a node on this machine, without Kueue, to bring it to")
    publisher, made = Publisher(given.node), Queue(place)
    try:
        publisher.install()
        yield made
        # Kueue lets go of pods that it admitted; without it they would never end.
        place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
        eventually("no pod is left", lambda: not place.items("pods"), 120)
        made.remove()
    finally:
        publisher.remove()
