"""What a source is to the rest of the fetch: a listing at one commit, and a stream of bytes from an offset.

Invariants: a `Listing` is complete and pinned: reading its files later gives the bytes it promised, or an
error. Knows nothing of destinations, retries or progress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from stoker_runtime.fetch.errors import FetchFailed


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file. `size` in bytes, -1 when the source does not say. Digests are lower-case hex, "" when not
    given.

    `git_blob` is SHA-1 over git's blob header and the content. `version` pins bytes that no digest pins (an
    ETag).
    """

    name: str
    size: int
    place: str
    sha256: str = ""
    git_blob: str = ""
    version: str = ""

    @property
    def identity(self) -> str:
        """Names these very bytes for a partial file; "" when nothing does, so that nothing may be resumed."""
        pin = self.sha256 or self.git_blob or self.version
        return hashlib.sha256(f"{self.name}\n{self.size}\n{pin}".encode()).hexdigest()[:24] if pin else ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every file of a source at one revision. `revision` is a commit, an ETag, or "" for a plain folder."""

    revision: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """An open stream. `offset` is where it really starts: 0 when the source ignored the offset asked for."""

    offset: int
    chunks: Iterator[bytes]


class Bounded:
    """An answer's bytes, of which more than `most` are an error: nobody reads a listing into memory without end.

    Mixed with the stream class of an HTTP client.
    """

    def __init__(self, stream: Iterable[bytes], most: int, where: str) -> None:
        self._stream = stream
        self._most = most
        self._where = where

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for block in self._stream:
            count += len(block)
            if count > self._most:
                raise FetchFailed(f"{self._where} answered with more than {self._most:,} bytes where few are expected.")
            yield block

    def close(self) -> None:
        """Close the connection below."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


class Transient(Exception):
    """Trying again may help. `error` is what to raise when it does not; `after` is in seconds, 0 = not
    said.
    """

    def __init__(self, error: Exception, after: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


class Source(Protocol):
    """A place that models come from."""

    local: bool
    """True when listing it costs no network."""

    def listing(self, revision: str) -> Listing:
        """Resolve `revision` and list all files. Raises FetchError or Transient."""
        ...

    def open(self, file: SourceFile, offset: int) -> AbstractContextManager[Body]:
        """Stream `file` from `offset`. Raises FetchError or Transient, also while the stream is read."""
        ...
