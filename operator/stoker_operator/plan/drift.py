"""Whether a live object still holds what was applied: the reason why a second reconcile writes nothing.

Two tests, both without a request. The applied-hash annotation differs when *we* want something else than
last time, fields we dropped included. The comparison below differs when *somebody else* changed a field
that we set. Fields that we do not set (replicas, sidecars, defaults, other people's annotations) are not
looked at, hence survive.
Invariants: lists of objects are matched by their key, so an injected sidecar is no difference.
Knows nothing of any one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_operator.manifests import applied_hash
from stoker_operator.spec.quantity import same_quantity

_KEYS = ("name", "uid", "mountPath", "key", "type")


def difference(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Why the manifest must be applied again: "" or a sentence."""
    if applied_hash(live) != applied_hash(manifest):
        return "the spec asks for something else"
    path = first_difference(live, manifest, "")
    return f"another writer changed {path}; restored" if path else ""


def first_difference(live: Any, wanted: Any, path: str) -> str:
    """The path of the first field of `wanted` that `live` does not hold; "" when there is none."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return "" if not wanted and live is None else path
        for key, value in wanted.items():
            if key not in live and value in ({}, [], "", False):
                continue
            found = first_difference(live.get(key), value, f"{path}.{key}".lstrip("."))
            if found:
                return found
        return ""
    if isinstance(wanted, list | tuple):
        return _list_difference(live, wanted, path)
    return "" if live == wanted or same_quantity(live, wanted) else path


def _tells_apart(key: str, wanted: Sequence[Any]) -> bool:
    """Whether every item has `key`, each another value of it."""
    values = [item.get(key) for item in wanted if isinstance(item, Mapping)]
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
    by_key = {item.get(key): item for item in live if isinstance(item, Mapping)}
    for item in wanted:
        found = first_difference(by_key.get(item[key]), item, f"{path}[{key}={item[key]}]")
        if found:
            return found
    return ""
