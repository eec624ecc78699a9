"""Whether a live object still holds what was applied: the reason why a second reconcile writes nothing.

Three tests, none with a request. The applied-hash annotation differs when *we* want something else than
last time, fields we dropped included. `first_difference` differs when *somebody else* changed a field
that we set. `restored` differs when somebody added to what is ours alone: what decides who is reached and who is
isolated, what our containers are told, and where they run. All else that we do not set (replicas, sidecars, defaults,
other people's annotations) is not looked at, hence survives.
Invariants: lists of objects are matched by their key, so an injected sidecar is no difference.
Knows nothing of how an object is put right.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from stoker_operator.manifests import applied_hash
from stoker_operator.spec.quantity import same_quantity

_KEYS = ("name", "uid", "mountPath", "key", "type")
# Where the pods' specs are, by kind.
_GROUP = ("spec", "leaderWorkerTemplate")
_POD_SPECS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Deployment": (("spec", "template", "spec"),),
    "Job": (("spec", "template", "spec"),),
    "LeaderWorkerSet": ((*_GROUP, "leaderTemplate", "spec"), (*_GROUP, "workerTemplate", "spec")),
}
# Ours alone, by kind: as a whole, whatever is in it.
_WHOLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "Service": (("spec", "selector"), ("spec", "externalIPs")),
    "PodDisruptionBudget": (("spec", "selector"),),
    "InferencePool": (("spec", "selector"),),
    "NetworkPolicy": (("spec",),),
    **{kind: tuple((*path, "nodeSelector") for path in _POD_SPECS[kind]) for kind in ("Deployment", "LeaderWorkerSet")},
}
# Ours alone as lists: nobody adds an item; the API server's defaults in one of ours stay.
_LISTS: dict[str, tuple[tuple[str, ...], ...]] = {"Service": (("spec", "ports"),)}


def difference(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Why the manifest must be applied again: "" or a sentence."""
    if applied_hash(live) != applied_hash(manifest):
        return "the spec asks for something else"
    path = first_difference(live, manifest, "")
    return f"another writer changed {path}; restored" if path else ""


def _is_mapping(value: object) -> bool:
    """As isinstance, which takes its time with abstract classes."""
    return type(value) is dict or isinstance(value, Mapping)


def first_difference(live: Any, wanted: Any, path: str) -> str:
    """The path of the first field of `wanted` that `live` does not hold; "" when there is none."""
    if _is_mapping(wanted):
        if not _is_mapping(live):
            return "" if not wanted and live is None else path
        for key, value in wanted.items():
            there = live.get(key)
            if there == value or (key not in live and value in ({}, [], "", False)):
                continue  # nearly always, and at once for all that is below
            found = first_difference(there, value, f"{path}.{key}".lstrip("."))
            if found:
                return found
        return ""
    if isinstance(wanted, list | tuple):
        return _list_difference(live, wanted, path)
    return "" if live == wanted or same_quantity(live, wanted) else path


def restored(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what others added to what is ours alone, the JSON merge patch that takes it out of the live object);
    ("", {}) when they added nothing.
    """
    path = _added(live, manifest, mend=False)
    if not path:
        return "", {}  # nearly always: nothing was copied for it
    there = copy.deepcopy(dict(live))
    _added(there, manifest, mend=True)
    return path, _merge_patch(live, there)


def _added(there: Mapping[str, Any], manifest: Mapping[str, Any], *, mend: bool) -> str:
    """The path of the first thing that others added to what is ours alone, "" = nothing; `mend` takes it out."""
    kind = str(manifest["kind"])
    for path in _WHOLE.get(kind, ()):
        holder, key = _at(there, path), path[-1]
        wanted = _at(manifest, path).get(key)
        if not _holds_no_more(holder.get(key), wanted):
            if mend:
                _put_right(holder, key, wanted)
            return ".".join(path)
    lists = [(path, _at(there, path), _at(manifest, path)) for path in _LISTS.get(kind, ())]
    for pod in _POD_SPECS.get(kind, ()):
        for group in ("containers", "initContainers"):
            ours = {item["name"]: item for item in _at(manifest, (*pod, group)).get(group) or ()}
            for item in _at(there, (*pod, group)).get(group) or ():
                if item["name"] in ours:
                    where = (*pod, f"{group}[name={item['name']}]")
                    lists += [((*where, part), item, ours[item["name"]]) for part in ("env", "envFrom")]
    for path, holder, wanted_holder in lists:
        key = path[-1]
        kept = _without_added(holder.get(key) or (), wanted_holder.get(key) or ())
        if len(kept) != len(holder.get(key) or ()):
            if mend:
                _put_right(holder, key, kept)
            return ".".join(path)
    return ""


def _at(item: Any, path: Sequence[str]) -> Any:
    """The mapping that holds the last part of a path; an empty one when the path leads nowhere."""
    for part in path[:-1]:
        item = item.get(part) if _is_mapping(item) else None
    return item if _is_mapping(item) else {}


def _put_right(holder: dict[str, Any], key: str, value: Any) -> None:
    holder.pop(key, None)
    if value:
        holder[key] = value


def _merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What makes one object of another (RFC 7386): what went is null, a list that differs comes whole."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            inner = _merge_patch(known, value)
            patch |= {key: inner} if inner else {}
        elif value != known:
            patch[key] = value
    return patch


def _holds_no_more(live: Any, wanted: Any) -> bool:
    """Whether nothing is in `live` that is not in `wanted`; what is missing there is first_difference's to see."""
    if _is_mapping(live):
        known = wanted if _is_mapping(wanted) else {}
        return all(_holds_no_more(value, known.get(key)) for key, value in live.items())
    if isinstance(live, list):
        items = wanted if isinstance(wanted, list) else []
        return len(live) <= len(items) and all(map(_holds_no_more, live, items))
    return not live or live == wanted


def _without_added(live: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """The items that are wanted: by name where they have one."""
    names = {item.get("name") for item in wanted}
    return [item for item in live if (item["name"] in names if "name" in item else item in wanted)]


def _tells_apart(key: str, wanted: Sequence[Any]) -> bool:
    """Whether every item has `key`, each another value of it."""
    values = [item.get(key) for item in wanted if _is_mapping(item)]
    return len(values) == len(wanted) > 0 and None not in values and len(set(map(str, values))) == len(values)


def _list_difference(live: Any, wanted: Sequence[Any], path: str) -> str:
    if not isinstance(live, list | tuple):
        return "" if not wanted and live is None else path
    key = next((key for key in _KEYS if _tells_apart(key, wanted)), "")
    if not key:
        if len(live) != len(wanted):
            return path
        pairs = list(zip(live, wanted, strict=True))
        return next((d for i, (a, b) in enumerate(pairs) if (d := first_difference(a, b, f"{path}[{i}]"))), "")
    by_key = {item.get(key): item for item in live if _is_mapping(item)}
    for item in wanted:
        found = first_difference(by_key.get(item[key]), item, f"{path}[{key}={item[key]}]")
        if found:
            return found
    return ""
