"""Services that were read lately, by the text they were read from: one is looked at many times between two changes.

Invariants: what is given is what reading it anew would give: the text is all that is read, but for the status, which
every look brings along.
Knows nothing of what is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import orjson

T = TypeVar("T")
_MOST = 4096
# What a service is read from in its metadata; all else there changes with every write to its status.
_META = ("name", "namespace", "uid", "generation", "deletionTimestamp", "annotations")


class Lately(Generic[T]):
    """`read(raw, tolerate_unknown)` is called for what is not remembered; what it raises is remembered by nobody."""

    def __init__(self, read: Callable[[Mapping[str, Any], bool], T], most: int = _MOST) -> None:
        self._read, self._most = read, most
        self._known: dict[bytes, T] = {}

    def read(self, raw: Mapping[str, Any], tolerate_unknown: bool) -> T:
        """What `raw` is read to."""
        key = _text(raw, tolerate_unknown)
        found = self._known.get(key) if key else None
        if found is None:
            found = self._read(raw, tolerate_unknown)
            if key:
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        return found


def _text(raw: Mapping[str, Any], tolerate_unknown: bool) -> bytes:
    """A digest of what is read; b"" where that is no JSON."""
    meta = raw.get("metadata")
    chosen = {key: meta.get(key) for key in _META if key in meta} if isinstance(meta, Mapping) else meta
    rest = {key: value for key, value in raw.items() if key not in ("metadata", "status")}
    try:
        text = orjson.dumps([chosen, rest, tolerate_unknown])
    except (TypeError, ValueError):
        return b""
    return hashlib.blake2b(text, digest_size=16).digest()
