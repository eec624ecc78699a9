"""GPUs that the node's status says it has: the scheduler counts them like real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.scenarios.kube import Kube

GPU = "nvidia.com/gpu"


def give(kube: Kube, gpus: int | None) -> None:
    """Let the node have so many GPUs; None = it knows of none."""
    node = kube.items("nodes")[0]["metadata"]["name"]
    for field in ("capacity", "allocatable"):
        told = None if gpus is None else str(gpus)
        kube.merge("node", node, {"status": {field: {GPU: told}}}, "--subresource=status")


@pytest.fixture
def gpus(kube: Kube) -> Iterator[int]:
    """The node has two GPUs for the length of a test."""
    give(kube, 2)
    yield 2
    give(kube, None)
