"""The node cache, which the chart brings when it is asked to: on for these scenarios, off again for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube

# Room for three copies of the hub's model, of 98 MB each.
SIZE = "330Mi"


@pytest.fixture(scope="module")
def node_cache(installed: Kube, given: Given) -> Iterator[Callable[[str], None]]:
    """Switched on by an upgrade, as a person would, and off by another one; its folder goes with the rig's node.

    The value brings the node a disk on which nothing is, of another name.
    """

    def switch(value: str, name: str = "node-cache") -> None:
        folder = given.node.layout.data / name if given.node is not None else f"/var/lib/stoker/{name}"
        stoker.upgrade(installed, f"nodeCache.enabled={value},nodeCache.size={SIZE},nodeCache.folder={folder}")

    switch("true")
    yield lambda name: switch("true", name)
    switch("false")
