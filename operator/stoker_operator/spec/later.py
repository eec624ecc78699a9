"""Fields that InferenceService is to have and this version has not: refused by name, with what to do in their place.

Invariants: the CRD refuses the same fields with the same words (a test compares them), so none is dropped unseen, as
Kubernetes does with a field that a CRD does not know.
Knows nothing of the fields that work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATER = {
    "spec.runtime.warmup": "not supported: a pod is ready after a warm-up completion, always, so that no client waits "
    "for what it finds out",
    "spec.podTemplate.spec.hostNetwork": "not supported: pods meet the restricted Pod Security profile, always",
    "spec.podTemplate.spec.hostPID": "not supported: pods meet the restricted Pod Security profile, always",
    "spec.podTemplate.spec.hostIPC": "not supported: pods meet the restricted Pod Security profile, always",
}


def name_later(raw: Mapping[str, Any], problems: list[str]) -> list[str]:
    """The problems of a manifest, with its fields of a later version refused by their own words."""
    found = [path for path in LATER if _has(raw, path.split("."))]
    rest = [text for text in problems if not any(text.startswith(f"{path}: is not a field") for path in found)]
    return [*(f"{path}: {LATER[path]}" for path in found), *rest]


def split_unknown(problems: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """(the fields that are unknown, the other problems)."""
    unknown = tuple(text.partition(": is not a field")[0] for text in problems if ": is not a field" in text)
    return unknown, [text for text in problems if ": is not a field" not in text]


def _has(raw: Any, names: list[str]) -> bool:
    if not isinstance(raw, Mapping) or names[0] not in raw:
        return False
    return len(names) == 1 or _has(raw[names[0]], names[1:])
