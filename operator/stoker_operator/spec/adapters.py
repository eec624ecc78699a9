"""Reads `spec.model.adapters`: LoRA adapters that are served beside the model, under names of their own.

Invariants: the CRD's bounds and rules again, in the same words. An adapter is a folder, so a source that is one file is
none.
Knows nothing of how adapters come to pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker_operator.spec.reader import Reader

MOST = 64
NO_VOLUME = (
    "need a cache volume that a Job can write to while pods run: cache.mode Auto, PVC for a pvc:// model, and another "
    "accessMode than ReadWriteOncePod"
)
URI_PATTERN = (
    r"^(hf://[^/ ]+/[^/ ]+|(s3|gs|az)://[a-z0-9$][a-z0-9._-]+[a-z0-9](/[^ ?#]*)?"
    r"|oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]+)?"
    r"|file:///[^ ]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^ ]*)?)$"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: the name that clients use for it, and its source."""

    name: str
    uri: str
    revision: str = "main"


def read_adapters(r: Reader, name_pattern: str, revision_pattern: str) -> tuple[Adapter, ...] | None:
    """The adapters of `spec.model`; None where the spec does not speak of any, so that pods make no room for them."""
    if "adapters" not in r.raw:
        return None
    found = []
    for index, entry in enumerate(r.objects("adapters", most=MOST)):
        item = Reader(entry, f"{r.path}.adapters[{index}]", r.problems)
        found.append(
            Adapter(
                name=item.text("name", pattern=name_pattern, longest=128, required=True),
                uri=item.text("uri", pattern=URI_PATTERN, longest=1024, required=True),
                revision=item.text("revision", default="main", pattern=revision_pattern, longest=256),
            )
        )
        item.finish()
    return tuple(found)


def adapter_problems(adapters: Sequence[Adapter], served_names: Sequence[str], *, volume: bool) -> Iterator[str]:
    """The CRD's rules across fields."""
    names = [adapter.name for adapter in adapters]
    for index, adapter in enumerate(adapters):
        where = f"spec.model.adapters[{index}]"
        if adapter.name in names[:index]:
            yield f"{where}.name: {adapter.name!r} is there twice"
        if adapter.revision != "main" and not adapter.uri.startswith("hf://"):
            yield f"{where}.revision: only hf:// sources have revisions"
    if any(name in served_names for name in names):
        yield "spec.model.adapters: an adapter's name must be none of the model's own (model.servedNames)"
    if not volume:
        yield f"spec.model.adapters: {NO_VOLUME}"
