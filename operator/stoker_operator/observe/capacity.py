"""Whether a node has a GPU to spare for one more pod of a service.

Invariants: pure; pods that terminate count, since they hold their GPUs until they are gone; a doubt is a no.
Knows nothing of the rest of scheduling: the scheduler's own word comes later and is heeded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stoker_operator.observe.gpu import PRODUCT
from stoker_operator.observe.rollout import is_finished
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
MOST_NODES = 50


def candidates(service: InferenceService, nodes: Iterable[Object]) -> list[Object]:
    """The nodes that a pod of this service may run on and that have GPUs at all."""
    return [node for node in nodes if _eligible(service, node)][:MOST_NODES]


def has_room(service: InferenceService, node: Object, pods: Iterable[Object]) -> bool:
    """Whether `node`, with all of its `pods`, has enough GPUs left."""
    resource = service.resources.gpu_resource
    held = sum(_asked(pod, resource) for pod in pods if not is_finished(pod))
    return _allocatable(node, resource) - held >= service.resources.gpus


def _eligible(service: InferenceService, node: Object) -> bool:
    spec, labels = node.get("spec", {}), node["metadata"].get("labels") or {}
    products = service.resources.gpu_products
    conditions = node.get("status", {}).get("conditions") or ()
    return (
        not spec.get("unschedulable")
        and any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
        and service.placement.node_selector.items() <= labels.items()
        and (not products or labels.get(PRODUCT) in products)
        and all(_tolerated(taint, service.placement.tolerations) for taint in spec.get("taints") or ())
        and _allocatable(node, service.resources.gpu_resource) > 0
    )


def _tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    if taint.get("effect") == "PreferNoSchedule":
        return True
    for item in tolerations:
        same_key = item.get("key", "") in ("", taint["key"])
        same_value = item.get("operator") == "Exists" or item.get("value", "") == taint.get("value", "")
        if same_key and same_value and item.get("effect", "") in ("", taint["effect"]):
            return True
    return False


def _allocatable(node: Object, resource: str) -> int:
    return int(quantity(str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))))


def _asked(pod: Object, resource: str) -> int:
    """What a pod holds of an extended resource: its containers together, or its largest init container."""

    def of(containers: Iterable[Object]) -> list[int]:
        limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
        return [int(quantity(str(item.get(resource, "0")))) for item in limits]

    spec = pod["spec"]
    return max([sum(of(spec["containers"])), *of(spec.get("initContainers") or ())])
