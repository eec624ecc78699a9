"""The objects of one kind as the mirror keeps them: packed, a hundredth of what they are parsed to.

Invariants: an object is never replaced by an older version of itself, and one that was deleted does not come back with
a late answer; every reader gets an object of his own. Of an object all is kept but who wrote which of its fields, where
no plan asks for it, and what nobody asks of its kind: the status of a disruption budget, and of a ReplicaSet the status
and the template.
Knows nothing of where objects come from.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from stoker_operator.cluster.api import Object
from stoker_operator.cluster.kinds import CLAIM, DEPLOYMENT, DISRUPTION_BUDGET, LEADER_WORKER_SET, REPLICA_SET
from stoker_operator.manifests.cache import services_of

_MOST_TOMBSTONES = 10_000
# Whether a field is still as we applied it is asked of these alone; it is half of every object.
_FIELDS_ASKED = (DEPLOYMENT.kind, LEADER_WORKER_SET.kind, CLAIM.kind)
# Kept beside the object.
_ALWAYS = ("resourceVersion",)
# Raw deflate at its quickest, with a window of 16 KiB: what objects of one kind have in common lies in the first one.
_LEVEL, _WINDOW, _MEMORY = 1, -14, 7
Place = tuple[str, str]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Entry:
    """`services` are the names of those that the object concerns; the version stands here alone."""

    uid: str
    version: int
    services: tuple[str, ...]
    packed: bytes


@dataclass(slots=True)
class Shelf:
    """The objects of one kind, by (namespace, name); `named` are the names by (namespace, service).

    `pattern` is the text of the first object, by which all are packed. `deleted` are the versions at
    which objects went, by uid: an object that lost its label went too, and may come back. `writing` counts the writes
    under way of an object, `held` are the events that wait for their end.
    """

    entries: dict[Place, Entry] = field(default_factory=dict)
    pattern: bytes = b""
    named: dict[Place, set[str]] = field(default_factory=dict)
    inside: dict[str, set[str]] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    writing: dict[Place, int] = field(default_factory=dict)
    held: dict[Place, list[tuple[str, Object]]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    watches: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_followed(self) -> bool:
        """Whether it was listed, and every watch goes on."""
        return bool(self.watches) and not any(task.done() for task in self.watches)

    def put(self, item: Object) -> bool:
        """Take an object over, unless a newer version of it is known; whether it is another one to who reads it."""
        meta = item["metadata"]
        place, version = (meta["namespace"], meta["name"]), int(meta["resourceVersion"])
        known = self.entries.get(place)
        if self.deleted.get(meta["uid"], -1) >= version or (known is not None and known.version >= version):
            return False
        packed = self._pack(item)
        if known is not None and known.uid == meta["uid"] and known.packed == packed:
            self.entries[place] = Entry(known.uid, version, known.services, packed)
            return False
        if known is not None:
            self._forget(place, known)
        entry = Entry(meta["uid"], version, tuple(sorted(services_of(meta))) or ("",), packed)
        self.entries[place] = entry
        for service in entry.services:
            self.named.setdefault((place[0], service), set()).add(place[1])
        self.inside.setdefault(place[0], set()).add(place[1])
        return True

    def read(self, place: Place) -> Object:
        """An object that is there, for one reader."""
        return self.unpack(self.entries[place])

    def unpack(self, entry: Entry) -> Object:
        """An object as it was, for one reader."""
        found: Object = orjson.loads(zlib.decompressobj(_WINDOW, zdict=self.pattern).decompress(entry.packed))
        found["metadata"]["resourceVersion"] = str(entry.version)
        return found

    def being_deleted(self, place: Place) -> None:
        """Let an object that is there be seen as one that goes."""
        known, item = self.entries[place], self.read(place)
        item["metadata"].setdefault("deletionTimestamp", "now")
        self.entries[place] = Entry(known.uid, known.version, known.services, self._pack(item))

    def _pack(self, item: Object) -> bytes:
        left_out = _ALWAYS if item["kind"] in _FIELDS_ASKED else (*_ALWAYS, "managedFields")
        kept = item | {"metadata": _but(item["metadata"], left_out)}
        if item["kind"] == DISRUPTION_BUDGET.kind:
            kept = _but(kept, ("status",))
        elif item["kind"] == REPLICA_SET.kind:
            kept = _but(kept, ("status",)) | {"spec": _but(item.get("spec") or {}, ("template",))}
        # Sorted, since the answer to a write and a watch need not have one order.
        text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)
        self.pattern = self.pattern or text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW, _MEMORY, zdict=self.pattern)
        return packer.compress(text) + packer.flush()

    def remove(self, meta: Mapping[str, Any], version: str) -> None:
        """Take an object out, and remember that it is gone since `version`; one that came back since stays."""
        place = (meta["namespace"], meta["name"])
        self.deleted[meta["uid"]] = int(version)
        while len(self.deleted) > _MOST_TOMBSTONES:
            del self.deleted[next(iter(self.deleted))]
        known = self.entries.get(place)
        if known is not None and known.uid == meta["uid"] and known.version <= int(version):
            self._forget(place, known)

    def holds(self, event: str, item: Object) -> bool:
        """Whether an event waits, since its object is being written."""
        place = (item["metadata"]["namespace"], item["metadata"]["name"])
        if place in self.writing:
            self.held.setdefault(place, []).append((event, item))
        return place in self.writing

    def forget_all(self) -> None:
        """Know nothing any more."""
        for part in (self.entries, self.named, self.inside, self.deleted):
            part.clear()

    def _forget(self, place: Place, entry: Entry) -> None:
        del self.entries[place]
        for service in entry.services:
            _drop(self.named, (place[0], service), place[1])
        _drop(self.inside, place[0], place[1])


def _but(item: Mapping[str, Any], left_out: Container[str]) -> Object:
    """A mapping without some of its keys."""
    return {key: value for key, value in item.items() if key not in left_out}


def _drop(index: dict[K, set[str]], key: K, name: str) -> None:
    """Take a name out of an index, and its set with the last one: services come and go for years."""
    index[key].discard(name)
    if not index[key]:
        del index[key]


class Packed(Mapping[str, Object]):
    """Objects by name as they were at one moment, each unpacked when it is asked for."""

    def __init__(self, shelf: Shelf, entries: Mapping[str, Entry]) -> None:
        self._shelf, self._entries = shelf, entries

    def __getitem__(self, name: str) -> Object:
        return self._shelf.unpack(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
