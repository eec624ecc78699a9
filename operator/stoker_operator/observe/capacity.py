"""Whether a node takes one more pod: as things are, once pods that wait have their place, and once a pod that runs
there is gone.

Invariants: pure; pods that terminate count, since they hold what they have until they are gone; a doubt is a no.
Knows nothing of the rest of scheduling (volumes, spreading, other pods' wishes): the scheduler's own word comes later
and is heeded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from stoker_operator.observe.rollout import is_finished
from stoker_operator.spec.quantity import quantity

Object = Mapping[str, Any]
Held = dict[str, list[Object]]
MOST_NODES = 50
_COMPARED = {
    "In": lambda there, values: there in values,
    "NotIn": lambda there, values: there not in values,
    "Exists": lambda there, values: there is not None,
    "DoesNotExist": lambda there, values: there is None,
    "Gt": lambda there, values: str(there).isdigit() and int(there) > int(values[0]),
    "Lt": lambda there, values: str(there).isdigit() and int(there) < int(values[0]),
}


@dataclass(frozen=True, slots=True)
class Room:
    """Where one more replica could go. `spare`: nodes take its pods beside all others, those among them that wait for a
    place there; `freed`: they do once one replica of the same service is gone.
    """

    spare: bool
    freed: bool


def candidates(pod_spec: Object, nodes: Iterable[Object]) -> list[Object]:
    """The nodes that such a pod may run on, were they empty of others."""
    return [node for node in nodes if _may_run(pod_spec, node)][:MOST_NODES]


def has_room(pod_spec: Object, node: Object, pods: Iterable[Object]) -> bool:
    """Whether `node`, with these `pods` on it, has what such a pod asks for."""
    there = [requests(pod["spec"]) for pod in pods if not is_finished(pod)]
    asked = requests(pod_spec) | {"pods": Decimal(1)}
    for resource, amount in asked.items():
        held = sum((pod.get(resource, Decimal(0)) for pod in there), Decimal(0))
        held = Decimal(len(there)) if resource == "pods" else held
        if _allocatable(node, resource) - held < amount:
            return False
    return True


def places(asked: Sequence[Object], nodes: Iterable[Object], there: Mapping[str, Sequence[Object]]) -> bool:
    """Whether pods of the specs `asked` all find room at once on those `nodes` whose pods are `there`, one after the
    other on the first that takes it.
    """
    held = {name: list(pods) for name, pods in there.items()}
    known = [node for node in nodes if node["metadata"]["name"] in held]
    return all(_put({"spec": spec}, known, held) for spec in asked)


def filled(waiting: Iterable[Object], nodes: Iterable[Object], there: Mapping[str, Sequence[Object]]) -> Held:
    """What is on each node of `there` once the scheduler has come to those of the `waiting` pods that fit as things
    are: it tries one again that found no node only after seconds, while a fresh one would take the place at once.
    """
    held = {name: list(pods) for name, pods in there.items()}
    known = [node for node in nodes if node["metadata"]["name"] in held]
    for pod in waiting:
        _put(pod, known, held)
    return held


def _put(pod: Object, nodes: Sequence[Object], held: Held) -> bool:
    """Put a pod on the first node that takes it, if one does."""
    spec = pod["spec"]
    fitting = (node for node in candidates(spec, nodes) if has_room(spec, node, held[node["metadata"]["name"]]))
    node = next(fitting, None)
    if node is not None:
        held[node["metadata"]["name"]].append(pod)
    return node is not None


def is_promised(pod: Object, priority: int) -> bool:
    """Whether a pod without a node is to have the first one that takes it, before another one of that `priority`."""
    spec = pod["spec"]
    held_back = bool(spec.get("schedulingGates")) or "deletionTimestamp" in pod["metadata"] or is_finished(pod)
    return not held_back and int(spec.get("priority") or 0) >= priority


def allocatable_gpus(node: Object, resource: str) -> int:
    """How many GPUs a node has in all."""
    return int(_allocatable(node, resource))


def takes_the_place_of(pod_spec: Object, old: Object) -> bool:
    """Whether such a pod surely finds room where `old`, a pod's spec, leaves: it asks for no more, is no choosier."""
    where = ("nodeSelector", "topologySpreadConstraints")
    same = all((pod_spec.get(key) or None) == (old.get(key) or None) for key in where)
    same = same and _demands(pod_spec) == _demands(old)
    usual = "default-scheduler"
    scheduler = (pod_spec.get("schedulerName") or usual) == (old.get("schedulerName") or usual)
    # A live pod carries tolerations of Kubernetes' own, too.
    kept = all(item in (pod_spec.get("tolerations") or ()) for item in _own_tolerations(old))
    held = requests(old)
    return same and scheduler and kept and all(held.get(key, 0) >= amount for key, amount in requests(pod_spec).items())


def _demands(pod_spec: Object) -> dict[str, Any]:
    """Its affinity without what it only wishes, which keeps it from no node."""
    found: dict[str, Any] = {}
    for kind, terms in (pod_spec.get("affinity") or {}).items():
        required = {name: value for name, value in (terms or {}).items() if not name.startswith("preferred")}
        found |= {kind: required} if required else {}
    return found


def requests(pod_spec: Object) -> dict[str, Decimal]:
    """What a pod holds of its node: its containers together, or its largest init container."""
    running = [_of(container) for container in pod_spec.get("containers") or ()]
    first = [_of(container) for container in pod_spec.get("initContainers") or ()]
    # An init container that is restarted runs beside the others for good.
    running += [_of(item) for item in pod_spec.get("initContainers") or () if item.get("restartPolicy") == "Always"]
    names = {name for part in (*running, *first) for name in part}
    found = {}
    for name in names:
        total = sum((part.get(name, Decimal(0)) for part in running), Decimal(0))
        found[name] = max([total, *(part.get(name, Decimal(0)) for part in first)])
    for name, value in (pod_spec.get("overhead") or {}).items():
        found[name] = found.get(name, Decimal(0)) + _amount(value)
    return {name: amount for name, amount in found.items() if amount}


def _of(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = dict(resources.get("limits") or {}) | dict(resources.get("requests") or {})
    return {name: _amount(value) for name, value in asked.items()}


def _amount(value: object) -> Decimal:
    try:
        return quantity(str(value))
    except ValueError:
        return Decimal("Infinity")  # a notation that we do not read: a doubt


def _own_tolerations(pod_spec: Object) -> list[Object]:
    added = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return [item for item in pod_spec.get("tolerations") or () if item.get("key") not in added]


def _may_run(pod_spec: Object, node: Object) -> bool:
    spec, labels = node.get("spec", {}), node["metadata"].get("labels") or {}
    conditions = node.get("status", {}).get("conditions") or ()
    return (
        not spec.get("unschedulable")
        and any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
        and (pod_spec.get("nodeSelector") or {}).items() <= labels.items()
        and _affine(pod_spec, node, labels)
        and all(_tolerated(taint, pod_spec.get("tolerations") or ()) for taint in spec.get("taints") or ())
    )


def _affine(pod_spec: Object, node: Object, labels: Mapping[str, str]) -> bool:
    affinity = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity is None:
        return True
    fields = {"metadata.name": node["metadata"]["name"]}
    for term in affinity.get("nodeSelectorTerms") or ():
        rules = [(labels, rule) for rule in term.get("matchExpressions") or ()]
        rules += [(fields, rule) for rule in term.get("matchFields") or ()]
        if rules and all(_matches(there.get(str(rule["key"])), rule) for there, rule in rules):
            return True
    return False


def _matches(value: str | None, rule: Object) -> bool:
    compare = _COMPARED.get(str(rule.get("operator")))
    return compare is not None and bool(compare(value, rule.get("values") or ()))


def _tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    if taint.get("effect") == "PreferNoSchedule":
        return True
    for item in tolerations:
        same_key = item.get("key", "") in ("", taint["key"])
        same_value = item.get("operator") == "Exists" or item.get("value", "") == taint.get("value", "")
        if same_key and same_value and item.get("effect", "") in ("", taint["effect"]):
            return True
    return False


def _allocatable(node: Object, resource: str) -> Decimal:
    value = node.get("status", {}).get("allocatable", {}).get(resource, "0")
    try:
        return quantity(str(value))
    except ValueError:
        return Decimal(0)
