"""What pods' claims ask of their node, and the volumes that answer them: pure.

Invariants: a volume is for one claim, by its uid, and on this node alone; it goes with the node; what it shows is the
folder of the claim's own namespace and nothing else.
Knows nothing of the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stoker_operator.manifests.copies import DIGEST, FILLER, READER, SELECTED_NODE
from stoker_operator.manifests.identity import COMPONENT, MANAGED_BY, SOURCE_LABEL, short_hash
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import GROUP

Object = Mapping[str, Any]
PROVISIONER = f"{GROUP}/node-cache"
NODE_LABEL = f"node-cache.{GROUP}/node"
HOSTNAME = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class Wish:
    """A claim that waits for its volume. `fills`: its pod brings a model; else it reads the one of `digest`. Several
    tries of one fetch have one `source`, and share its room.
    """

    claim: Object
    fills: bool
    digest: str
    source: str
    bytes: int

    @property
    def namespace(self) -> str:
        """The claim's."""
        return str(self.claim["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """The claim's."""
        return str(self.claim["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Lent:
    """A volume that an agent made. `folder` is the namespace's; `digest` "" = its pod is to find out what it brings."""

    volume: Object
    folder: str
    fills: bool
    digest: str
    source: str
    bytes: int
    made: float

    @property
    def claim(self) -> tuple[str, str, str]:
        """(namespace, name, uid) of the claim that it is for."""
        ref = self.volume["spec"]["claimRef"]
        return str(ref["namespace"]), str(ref["name"]), str(ref["uid"])


def read_wish(claim: Object, node: str, storage_class: str) -> Wish | None:
    """What a claim asks of this node; None where it asks nothing, or has it."""
    meta, spec = claim["metadata"], claim["spec"]
    notes = meta.get("annotations") or {}
    component = (meta.get("labels") or {}).get(COMPONENT)
    if component not in (READER, FILLER) or spec.get("storageClassName") != storage_class:
        return None
    if notes.get(SELECTED_NODE) != node or spec.get("volumeName") or "deletionTimestamp" in meta:
        return None
    digest, fills = str(notes.get(DIGEST, "")), component == FILLER
    if not fills and not digest:
        return None
    return Wish(
        claim,
        fills,
        digest,
        str(notes.get(SOURCE_LABEL, "")),
        int(quantity(str(spec["resources"]["requests"]["storage"]))),
    )


def volume(wish: Wish, node: Object, folder: Path, storage_class: str) -> dict[str, Any]:
    """The volume that answers a wish with `folder`."""
    meta, claim = node["metadata"], wish.claim
    notes = {DIGEST: wish.digest, SOURCE_LABEL: wish.source, COMPONENT: FILLER if wish.fills else READER}
    here = {"key": HOSTNAME, "operator": "In", "values": [(meta.get("labels") or {}).get(HOSTNAME, meta["name"])]}
    owner = {"apiVersion": "v1", "kind": "Node", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": f"stoker-{claim['metadata']['uid']}",
            "labels": {MANAGED_BY: "stoker", NODE_LABEL: short_hash([meta["name"]], 16)},
            "annotations": {key: value for key, value in notes.items() if value}
            | {"pv.kubernetes.io/provisioned-by": PROVISIONER},
            "ownerReferences": [owner],
        },
        "spec": {
            "capacity": {"storage": str(claim["spec"]["resources"]["requests"]["storage"])},
            "accessModes": list(claim["spec"]["accessModes"]),
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": storage_class,
            "volumeMode": "Filesystem",
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": wish.namespace,
                "name": wish.name,
                "uid": claim["metadata"]["uid"],
            },
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def pod_of(claim: Object) -> str:
    """The pod that a claim is for; "" where it is none of a pod's own."""
    owners = claim["metadata"].get("ownerReferences") or ()
    return next((str(owner["name"]) for owner in owners if owner["kind"] == "Pod"), "")


def read_lent(found: Object) -> Lent:
    """A volume of an agent's, as it stands in the cluster."""
    meta = found["metadata"]
    notes = meta.get("annotations") or {}
    made = datetime.fromisoformat(str(meta["creationTimestamp"])).timestamp()
    size = int(quantity(str(found["spec"]["capacity"]["storage"])))
    folder = Path(str(found["spec"]["local"]["path"])).name
    digest, source = str(notes.get(DIGEST, "")), str(notes.get(SOURCE_LABEL, ""))
    return Lent(found, folder, notes.get(COMPONENT) == FILLER, digest, source, size, made)


def mine(node: str) -> str:
    """The selector of a node's volumes."""
    return f"{MANAGED_BY}=stoker,{NODE_LABEL}={short_hash([node], 16)}"
