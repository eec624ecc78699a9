"""Names, labels, owners and the applied-hash annotation that every manifest carries.

Invariants: a selector never changes for the life of a service; the hash covers the whole manifest but itself.
Knows nothing of any one kind.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson

from stoker_operator.spec.service import GROUP, KIND, VERSION, InferenceService

Manifest = dict[str, Any]

FIELD_MANAGER = "stoker-operator"
APPLIED = f"{GROUP}/applied"
CACHE_LABEL = f"{GROUP}/cache"
SOURCE_LABEL = f"{GROUP}/source"
ATTEMPT_LABEL = f"{GROUP}/attempt"
# When a Job was begun by the operator's clock, which may differ from the API server's.
BEGUN = f"{GROUP}/begun"
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
PART_OF = "app.kubernetes.io/part-of"
# The objects that are ours, as a label selector.
OURS = f"{MANAGED_BY}=stoker"
# The component of a group's pods but its leader, which is an engine as any.
WORKER = "worker"


def short_hash(value: object, length: int = 10) -> str:
    """A stable hash of plain data, as lower-case hex: of the JSON that Python's own encoder writes, which live objects
    were stamped by.
    """
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    if not text.isascii() or b"\x7f" in text:
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:length]


def labels(service: InferenceService, component: str) -> dict[str, str]:
    """The recommended labels of one child."""
    return {
        "app.kubernetes.io/name": "stoker",
        INSTANCE: service.name,
        COMPONENT: component,
        PART_OF: service.name,
        MANAGED_BY: "stoker",
    }


def pods_selector(service: InferenceService) -> dict[str, Any]:
    """The pods that answer clients, as a label selector: the engine's, those of a canary too."""
    return _either(service, ["canary", "engine"])


def _either(service: InferenceService, components: list[str]) -> dict[str, Any]:
    either = {"key": COMPONENT, "operator": "In", "values": components}
    return {"matchLabels": {INSTANCE: service.name, MANAGED_BY: "stoker"}, "matchExpressions": [either]}


def members_selector(service: InferenceService) -> dict[str, Any]:
    """The pods that a service's groups are made of, as a label selector."""
    return _either(service, ["engine", WORKER])


def shared_labels(service: InferenceService) -> dict[str, str]:
    """The same pods by labels alone, as a Service must select them. No pod of a Job has PART_OF."""
    return {INSTANCE: service.name, PART_OF: service.name, MANAGED_BY: "stoker"}


def job_labels(found: Mapping[str, str]) -> dict[str, str]:
    """The labels of a Job's pods, of its own."""
    return {key: value for key, value in found.items() if key != PART_OF}


def selector(service: InferenceService) -> dict[str, str]:
    """The labels that select a service's engine pods."""
    return {INSTANCE: service.name, COMPONENT: "engine", MANAGED_BY: "stoker"}


def owner(service: InferenceService) -> dict[str, Any]:
    """The owner reference by which deleting the service deletes the child."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(service: InferenceService, kind: tuple[str, str], name: str, component: str) -> Manifest:
    """The head of a child owned by one service: apiVersion, kind and metadata."""
    api_version, kind_name = kind
    return {
        "apiVersion": api_version,
        "kind": kind_name,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": labels(service, component),
            "ownerReferences": [owner(service)],
        },
    }


def stamped(manifest: Manifest) -> Manifest:
    """The manifest with the annotation that holds its own hash, by which a later reconcile knows it is in
    place.
    """
    meta = manifest["metadata"]
    stamp = {APPLIED: short_hash(manifest, 16)}
    return manifest | {"metadata": meta | {"annotations": meta.get("annotations", {}) | stamp}}


def applied_hash(manifest: Mapping[str, Any]) -> str:
    """The hash a stamped manifest or a live object carries; "" when it carries none."""
    annotations = manifest.get("metadata", {}).get("annotations") or {}
    return str(annotations.get(APPLIED, ""))


def cache_key(service: InferenceService) -> str:
    """Names the volume: a hash of the source and of the kind of volume."""
    model, cache = service.model, service.cache
    return _cache_key(
        model.uri, model.revision, model.endpoint, model.allow, model.ignore, model.sha256,
        cache.storage_class_name, cache.access_mode,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cache_key(*source: object) -> str:
    """One plan asks some seven times."""
    return short_hash(list(source))


def source_id(service: InferenceService, volume_uid: str) -> str:
    """Names one source on one volume; a result is only believed for the pair it was made for. Without a volume that
    pods share, the cache's mode stands for it.
    """
    return short_hash([cache_key(service), volume_uid])
