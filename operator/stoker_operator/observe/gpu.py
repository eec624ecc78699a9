"""The GPUs of a cluster, as the labels that GPU feature discovery puts on nodes tell of them.

Invariants: pure; a product whose memory nobody states is 0 GiB, which means unknown.
Knows nothing of what is to run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stoker_operator.observe.capacity import allocatable_gpus, candidates
from stoker_operator.spec.quantity import GIB

PRODUCT = "nvidia.com/gpu.product"
# A slice of a GPU, in a product's label (strategy "single") or in a resource's name (strategy "mixed").
_SLICE = re.compile(r"(?:MIG|mig)-\d+g\.(\d+)gb")
# What a slice of so many nominal GiB has at least, from 4.75 of 5 to 39.4 of 40.
_SLICE_SHARE = 0.95
# How many pods time slicing has share each GPU, or each slice of one. Nothing divides its memory among them, so each
# gets its part here. That they share it the product says, or the resource where it was renamed.
_GPU, _REPLICAS = "nvidia.com/gpu", "replicas"
_SHARED, _RENAMED = "-SHARED", ".shared"
# In MiB.
MEMORY = "nvidia.com/gpu.memory"
# GiB by NVIDIA's product label, where the label itself does not say.
_KNOWN = {
    "Tesla-T4": 15, "NVIDIA-L4": 23, "NVIDIA-A10G": 22, "NVIDIA-A10": 22, "NVIDIA-L40S": 45, "NVIDIA-L40": 45,
    "NVIDIA-H200": 140, "NVIDIA-B200": 178, "NVIDIA-RTX-A6000": 47, "NVIDIA-GeForce-RTX-4090": 23,
    "NVIDIA-GeForce-RTX-3090": 23, "NVIDIA-GeForce-RTX-5090": 31,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the cluster. "" and 0: no node told of one. `gib` is a pod's part, where `pods` share it."""

    product: str
    gib: float
    pods: int = 1

    @property
    def whole_gib(self) -> float:
        """What an engine sees of it."""
        return self.gib * self.pods


def largest_gpu(nodes: Iterable[Mapping[str, Any]], resource: str = "") -> Gpu:
    """The GPU with the most memory among nodes, by the labels of GPU feature discovery: a slice of it where `resource`
    is a slice's, a part of it where its time is sliced.
    """
    found = [Gpu("", 0.0)]
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        product, stated = str(labels.get(PRODUCT, "")), str(labels.get(MEMORY, ""))
        gib = slice_gib(resource) or slice_gib(product)
        if not gib:
            gib = int(stated) / 1024 if stated.isdigit() else gpu_memory_gib(product.removesuffix(_SHARED))
        pods = _sharers(labels, resource)
        found.append(Gpu(product, round(gib / pods, 1), pods))
    return max(found, key=lambda gpu: gpu.gib)


class LargestGpus:
    """The largest GPUs of one list of nodes, by the placement of pods: many services ask, of few kinds."""

    def __init__(self) -> None:
        self._nodes: Sequence[Mapping[str, Any]] = ()
        self._known: dict[bytes, Gpu] = {}

    def of(self, nodes: Sequence[Mapping[str, Any]], pod_spec: Mapping[str, Any], resource: str) -> Gpu:
        """As `largest_gpu`, of the nodes on which such a pod may run and that have the resource. The same list is taken
        to hold the same nodes.
        """
        if nodes is not self._nodes:
            self._nodes, self._known = nodes, {}
        key = orjson.dumps([pod_spec, resource])
        if key not in self._known:
            there = candidates(pod_spec, nodes)
            self._known[key] = largest_gpu((node for node in there if allocatable_gpus(node, resource)), resource)
        return self._known[key]


def _sharers(labels: Mapping[str, Any], resource: str) -> int:
    """How many pods a GPU's memory is for; where it is shared, a label says among how many. With the strategy "mixed"
    slices have labels of their own, by the name of their resource.
    """
    named = resource.removesuffix(_RENAMED) if slice_gib(resource) else _GPU
    product, replicas = (str(labels.get(f"{named}.{key}", "")) for key in ("product", _REPLICAS))
    return int(replicas) if is_shared(product, resource) and replicas.isdigit() and int(replicas) else 1


def is_shared(product: str, resource: str) -> bool:
    """Whether pods share each such GPU, by its product's label or its resource's name."""
    return product.endswith(_SHARED) or resource.endswith(_RENAMED)


def slice_gib(name: str) -> float:
    """Memory of a slice by a product's label or a resource's name, GiB; 0 for what is no slice."""
    found = _SLICE.search(name)
    return float(found[1]) * _SLICE_SHARE if found else 0.0


def gpu_memory_gib(product: str) -> float:
    """Memory of a GPU by its product label, GiB; 0 when it is not known, as of one that pods share: the label does not
    say how many.
    """
    if product.endswith(_SHARED):
        return 0.0
    if slice_gib(product):
        return slice_gib(product)
    stated = re.search(r"(\d+)GB", product)
    if stated:
        return float(stated[1]) * 10**9 / GIB
    return float(next((gib for name, gib in _KNOWN.items() if f"{product}-".startswith(f"{name}-")), 0))
