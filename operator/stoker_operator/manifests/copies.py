"""The pods' volume where no claim is shared: a copy on the node's own disk (cache.mode: Node), an image of a registry
(Image), or the pod's own folder (None).

A node's copy is a claim of the pod itself, an ephemeral volume, which the node cache agent of that node serves from the
folder that it keeps: so pods stay within the restricted profile, which knows no folders of the host.
Invariants: what a claim asks for is said by its labels and annotations alone: a reader's is served when the copy of its
digest is whole, a filler's when there is room.
Knows nothing of what an agent does.
"""

from __future__ import annotations

import math
from typing import Any

from stoker_operator.manifests.identity import COMPONENT, INSTANCE, MANAGED_BY, SOURCE_LABEL, short_hash
from stoker_operator.settings import Settings
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import GROUP, FetchedModel, InferenceService

READER, FILLER = "node-copy", "node-fill"
"""The components of the two kinds of claims."""
DIGEST = f"{GROUP}/digest"
# The agent's words on a claim for which its node has no room.
FULL = f"node-cache.{GROUP}/full"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
# On a node: an agent serves it; and, one label a copy, what it has.
SERVED = f"node-cache.{GROUP}/served"
COPY_PREFIX = f"copy.{GROUP}/"
_MIB = 1 << 20
# Partial files' ends, manifests, the file system's own.
_SPARE = 64 * _MIB


def copy_label(namespace: str, digest: str) -> str:
    """The label of a node that has the files of `digest` for a namespace."""
    return f"{COPY_PREFIX}{short_hash([namespace, digest], 16)}"


def room(model: FetchedModel) -> str:
    """What a folder for this model must hold, as a quantity."""
    return f"{math.ceil((model.bytes + _SPARE) / _MIB)}Mi"


def first_room(service: InferenceService, settings: Settings) -> str:
    """What the first fetch may bring, while nobody knows how large the model is."""
    return service.cache.size or settings.cache_size


def first_room_bytes(service: InferenceService, settings: Settings) -> int:
    """The same in bytes."""
    return int(quantity(first_room(service, settings)))


def reader_volume(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The volume of an engine's pod: the copy of its node."""
    return _node_volume(service, settings, READER, room(model), {DIGEST: model.digest})


def filler_volume(
    service: InferenceService, settings: Settings, source: str, wanted: str, digest: str = ""
) -> dict[str, Any]:
    """The volume of a pod that fetches onto its node; several of one `source` ask for the same room. `digest` "" = who
    fetches is to find out.
    """
    notes = {SOURCE_LABEL: source} | ({DIGEST: digest} if digest else {})
    return _node_volume(service, settings, FILLER, wanted, notes)


def own_folder(size: str) -> dict[str, Any]:
    """The volume of a pod that fetches for itself."""
    return {"name": "models", "emptyDir": {"sizeLimit": size}}


def image_volume(service: InferenceService, model: FetchedModel) -> dict[str, Any]:
    """The volume of a pod that mounts an image: the one that its name stood for when it was looked up."""
    reference = f"{image_repository(service)}@{model.digest}"
    return {"name": "models", "image": {"reference": reference, "pullPolicy": service.cache.pull_policy}}


def image_repository(service: InferenceService) -> str:
    """Where the image of an oci:// model is, without tag and digest."""
    name = service.model.uri.removeprefix("oci://").partition("@")[0]
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition(':')[0]}"


def near_copies(service: InferenceService, model: FetchedModel, affinity: dict[str, Any]) -> dict[str, Any]:
    """An affinity, and a wish for nodes that have the copy already."""
    has = {"key": copy_label(service.namespace, model.digest), "operator": "Exists"}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    node = affinity.get("nodeAffinity") or {}
    wishes = [*(node.get(preferred) or ()), {"weight": 100, "preference": {"matchExpressions": [has]}}]
    return affinity | {"nodeAffinity": {**node, preferred: wishes}}


def _node_volume(
    service: InferenceService, settings: Settings, component: str, size: str, notes: dict[str, str]
) -> dict[str, Any]:
    labels = {MANAGED_BY: "stoker", INSTANCE: service.name, COMPONENT: component}
    claim = {
        "metadata": {"labels": labels, "annotations": notes},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": settings.node_cache_class,
            "resources": {"requests": {"storage": size}},
        },
    }
    return {"name": "models", "ephemeral": {"volumeClaimTemplate": claim}}
