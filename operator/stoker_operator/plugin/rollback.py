"""`kubectl stoker rollback`: makes the spec say again what an earlier revision was made of.

Invariants: only the parts of the spec that shape pods change; the patch is refused by the API server when somebody else
changed the service meanwhile; a revision that was given up is not gone back to.
Knows nothing of how the operator rolls out what it then finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker_operator.manifests.revision import Record, read_record
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.screen import table
from stoker_operator.spec.service import SHAPING

Object = Mapping[str, Any]


def records_of(service: Object, revisions: Sequence[Object]) -> list[Record]:
    """The service's own records, oldest first."""
    uid = service["metadata"]["uid"]
    mine = [item for item in revisions if uid in {ref["uid"] for ref in item["metadata"].get("ownerReferences") or ()}]
    return sorted(map(read_record, mine), key=lambda record: record.number)


def listed(service: Object, records: Sequence[Record]) -> Iterator[str]:
    """A line a revision, oldest first."""
    current = running(service)
    rows = [("REVISION", "HASH", "STATE", "MODEL", "IMAGE")]
    for record in records:
        state = "given up" if record.failed else "served" if record.served else "never ready"
        model = record.spec.get("model") or {}
        source = f"{model['uri']} at {model.get('revision', 'main')}" if model else "not recorded"
        image = str(record.template["spec"]["containers"][0]["image"])
        here = " (runs)" if record.hash == current else ""
        rows.append((str(record.number), record.hash, f"{state}{here}", source, image))
    yield from table(rows)


def running(service: Object) -> str:
    """The hash of the revision that runs; "" while none does."""
    return str(((service.get("status") or {}).get("revisions") or {}).get("current", ""))


def target(service: Object, records: Sequence[Record], wanted: str) -> Record:
    """The revision to go back to: the one whose hash begins with `wanted`, else the last one that served and that the
    spec does not say any more. Raises PluginError.
    """
    if wanted:
        found = [record for record in records if record.hash.startswith(wanted)]
        if len(found) != 1:
            what = f"{len(found)} revisions begin" if found else "no revision begins"
            raise PluginError(f"{what} with {wanted!r}; see them with --list.")
        record = found[0]
    else:
        past = [record for record in records if record.served and not record.failed and operations(service, record)]
        if not past:
            raise PluginError("there is no other revision that served; see them with --list.")
        record = past[-1]
    if record.failed:
        raise PluginError(f"revision {record.hash} was given up: {record.failed}")
    if not record.spec:
        text = f"what revision {record.hash} was made of was not recorded: an older operator rolled it out"
        raise PluginError(f"{text}. Change the spec by hand.")
    return record


def operations(service: Object, record: Record) -> list[dict[str, Any]]:
    """The JSON patch that makes the spec say what the record says; none where it does already."""
    there, found = service["spec"], []
    for part in SHAPING:
        if part in record.spec and there.get(part) != record.spec[part]:
            found.append({"op": "add", "path": f"/spec/{part}", "value": record.spec[part]})
        elif part in there and part not in record.spec and record.spec:
            found.append({"op": "remove", "path": f"/spec/{part}"})
    if not found:
        return []
    unchanged = {"op": "test", "path": "/metadata/resourceVersion", "value": service["metadata"]["resourceVersion"]}
    return [unchanged, *found]
