"""The record of a revision: a ControllerRevision that holds a pod template, what of the spec it was made of, and
whether it ever served.

Invariants: named by the hash that Kubernetes gives the template's pods; its data never changes.
Knows nothing of when a revision is recorded or gone back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_operator.manifests.identity import Manifest, child, short_hash, stamped
from stoker_operator.spec.service import GROUP, InferenceService

REVISION = ("apps/v1", "ControllerRevision")
TEMPLATE_KEY = f"{GROUP}/template"
HASH = f"{GROUP}/pod-template-hash"
SERVED = f"{GROUP}/served"
FAILED = f"{GROUP}/failed"
_LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True)
class Record:
    """One revision. `hash` is its pods' pod-template-hash, `key` our own hash of the template as we apply it.

    `number` is the Deployment's; `failed` says why it was given up, "" = it was not; `spec` are the parts of the spec
    that shaped it, none where an older operator made the record.
    """

    hash: str
    key: str
    number: int
    template: Mapping[str, Any]
    served: bool = False
    failed: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)

    def failing(self, why: str) -> Record:
        """The same, given up."""
        return replace(self, failed=why[:_LONGEST_REASON] or "it never became ready")


def template_key(template: Mapping[str, Any]) -> str:
    """Names a pod template as we apply it."""
    return short_hash(template, 16)


def live_template_key(deployment: Mapping[str, Any]) -> str:
    """The key of the template that a live Deployment was last applied with; "" when it carries none."""
    return str((deployment["metadata"].get("annotations") or {}).get(TEMPLATE_KEY, ""))


def record_name(service: InferenceService, template_hash: str) -> str:
    """The name of a revision's record."""
    return f"{service.name}-{template_hash}"


def record_manifest(service: InferenceService, record: Record) -> Manifest:
    """The ControllerRevision of a record."""
    manifest = child(service, REVISION, record_name(service, record.hash), "revision")
    notes = {TEMPLATE_KEY: record.key, HASH: record.hash, SERVED: str(record.served).lower(), FAILED: record.failed}
    manifest["metadata"]["annotations"] = {key: value for key, value in notes.items() if value}
    data = {"template": dict(record.template)} | ({"spec": dict(record.spec)} if record.spec else {})
    return stamped(manifest | {"revision": record.number, "data": data})


def read_record(live: Mapping[str, Any]) -> Record:
    """The record that a live ControllerRevision of ours holds."""
    notes, data = live["metadata"].get("annotations") or {}, live.get("data") or {}
    return Record(
        hash=str(notes.get(HASH, "")),
        key=str(notes.get(TEMPLATE_KEY, "")),
        number=int(live.get("revision", 0)),
        template=data.get("template") or {},
        served=notes.get(SERVED) == "true",
        failed=str(notes.get(FAILED, "")),
        spec=data.get("spec") or {},
    )
