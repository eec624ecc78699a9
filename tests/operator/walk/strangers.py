"""Objects of others that look like ours: they carry a service's labels and have another owner, or none.

Invariants: none of them is ever to be written or deleted by the operator.
Knows nothing of when anybody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import FIELD_MANAGER

_LABELS = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}


def _theirs(labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "theirs", "labels": {**_LABELS, **(labels or {})}}}


_POD = {"schedulerName": "nobody", "containers": [{"name": "engine", "image": "theirs:1"}]}
_CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
_JOB = {
    "suspend": True,
    "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "fetch", "image": "theirs:1"}]}},
}
STRANGERS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    (kinds.NETWORK_POLICY, _theirs() | {"spec": {"podSelector": {}}}),
    (kinds.SERVICE, _theirs() | {"spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}}),
    (kinds.POD, _theirs({"app.kubernetes.io/component": "engine"}) | {"spec": _POD}),
    (kinds.JOB, _theirs({"app.kubernetes.io/component": "verify"}) | {"spec": _JOB}),
    (kinds.CLAIM, _theirs() | {"spec": _CLAIM}),
    (kinds.CONTROLLER_REVISION, _theirs() | {"revision": 1, "data": {"their": "own"}}),
)


def touched(item: Mapping[str, Any]) -> bool:
    """Whether the operator wrote a stranger's object, or somebody deletes it."""
    meta = item["metadata"]
    writers = {entry["manager"] for entry in meta.get("managedFields") or ()}
    return FIELD_MANAGER in writers or "deletionTimestamp" in meta
