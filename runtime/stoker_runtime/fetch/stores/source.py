"""An s3://, gs:// or az:// source: the objects below a prefix, each read in several ranges at a time.

A store has no commits: what stands for one is a digest of all names, sizes and ETags that were listed; whoever names
it as the revision gets those objects or none. Each range is
asked for under the listed ETag, so bytes of two versions are never mixed. A `stoker-manifest.json` at the prefix, as
`stoker fetch` writes it into each published folder, gives the objects their SHA-256.

Invariants: at most `_AHEAD` ranges of a file are in memory; bytes come in order, whatever order ranges arrive in.
Knows nothing of what is selected from the list.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.fetch import manifest as manifests
from stoker_runtime.fetch.errors import ChecksumMismatch, FetchError, FetchFailed, ModelNotFound, RevisionNotFound
from stoker_runtime.fetch.manifest import Manifest
from stoker_runtime.fetch.reference import Reference, relative_path
from stoker_runtime.fetch.source import Body, Listing, SourceFile, Transient
from stoker_runtime.fetch.stores.client import Bucket, bucket_of
from stoker_runtime.fetch.stores.errors import refused

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

MAX_FILES = 100_000
_AHEAD = 6
_PAGE = 1000
_MANIFEST_BYTES = 32 << 20
_STATE = re.compile(r"[0-9a-f]{40}")
# How long a reader waits before it lets the downloader look at its clock.
_TICK_SECONDS = 0.5


class Store:
    """The objects below a prefix, or one of them. Use it as a context manager."""

    local = False
    range_bytes = 8 << 20

    def __init__(self, reference: Reference, endpoint: str = "") -> None:
        """Raises BadRequest for settings that make no sense."""
        self._bucket: Bucket = bucket_of(reference, endpoint)
        self._prefix = reference.place.partition("/")[2]
        self._single = reference.file
        self._text = reference.text
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fetch-store", daemon=True)

    def __enter__(self) -> Store:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(_given_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listing(self, revision: str) -> Listing:
        """All objects below the prefix; of a single file, those beside it, among which may be its other parts.

        A `revision` that is such a digest must be that of what lies there. Raises RevisionNotFound when it is not.
        """
        files, promised = [], None
        for meta in self._objects():
            name = meta["path"][len(self._prefix) :].lstrip("/")
            if name == manifests.NAME:
                promised = self._manifest(meta)
            elif not _hidden(name):
                files.append(self._file(name, meta))
            if len(files) > MAX_FILES:
                raise FetchFailed(f"{self._text}: more than {MAX_FILES:,} objects lie there; name a longer prefix.")
        if not files:
            raise ModelNotFound(f"{self._text}: nothing lies there at {self._bucket.where}; check the prefix.")
        meant = (part_names(self._single) or (self._single,)) if self._single else ()
        counted = [file for file in sorted(files, key=_name) if not meant or file.name in meant]
        state = "\n".join(f"{file.name} {file.size} {file.version}" for file in counted)
        found = hashlib.sha256(state.encode()).hexdigest()[:40]
        if _STATE.fullmatch(revision) and revision != found:
            raise RevisionNotFound(f"{self._text}: what lies there is {found} by now, and no longer {revision}.")
        return Listing(found, tuple(_promised(file, promised, self._text) for file in files))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Read the object from `offset`."""
        reading = _Reading(self, file, offset)
        try:
            yield Body(offset, reading.blocks())
        finally:
            reading.close()

    def range(self, file: SourceFile, start: int, end: int) -> Future[bytes]:
        """Ask for the bytes from `start` up to `end`."""
        return asyncio.run_coroutine_threadsafe(self._get(file.place, file.version, (start, end)), self._loop)

    def error(self, place: str, error: Exception) -> FetchError | Transient:
        """What a failed request for the object at `place` means."""
        return refused(self._bucket, f"{self._bucket.scheme}://{self._bucket.name}/{place}", error)

    async def _get(self, place: str, version: str, span: tuple[int, int] | None) -> bytes:
        options: GetOptions = {"range": span} if span else {}
        options |= {"if_match": version} if version else {}
        answer = await obstore.get_async(self._bucket.client, place, options=options)
        return bytes(await answer.bytes_async())

    def _objects(self) -> Iterator[ObjectMeta]:
        prefix, client = self._prefix or None, self._bucket.client
        try:
            if self._single:
                yield from obstore.list_with_delimiter(client, prefix)["objects"]
            else:
                pages: Iterator[Sequence[ObjectMeta]] = obstore.list(client, prefix, chunk_size=_PAGE)
                for page in pages:
                    yield from page
        except (BaseError, OSError) as error:
            raise refused(self._bucket, self._text, error) from None

    def _file(self, name: str, meta: ObjectMeta) -> SourceFile:
        return SourceFile(relative_path(name, self._text), meta["size"], meta["path"], version=meta["e_tag"] or "")

    def _manifest(self, meta: ObjectMeta) -> Manifest:
        if meta["size"] > _MANIFEST_BYTES:
            raise FetchFailed(f"{self._text}: {manifests.NAME} has {meta['size']:,} bytes; it cannot be one of ours.")
        answer = self.run(self._get(meta["path"], meta["e_tag"] or "", None), meta["path"])
        try:
            return manifests.parse(json.loads(answer))
        except (ValueError, KeyError, TypeError, AttributeError, FetchError):
            raise ChecksumMismatch(
                f"{self._text}: {manifests.NAME} there is damaged; upload it again, or remove it."
            ) from None

    def run(self, work: Any, place: str) -> bytes:
        """Wait for one request. Raises FetchError or Transient."""
        try:
            return bytes(asyncio.run_coroutine_threadsafe(work, self._loop).result())
        except (BaseError, OSError) as error:
            raise self.error(place, error) from None


class _Reading:
    """One file that is read: a row of ranges under way, the first of which is handed out next."""

    def __init__(self, store: Store, file: SourceFile, offset: int) -> None:
        self._store = store
        self._file = file
        self._next = offset
        self._row: deque[Future[bytes]] = deque()

    def blocks(self) -> Iterator[bytes]:
        """The file's bytes in order; an empty block where none arrived for a while."""
        self._fill()
        while self._row:
            try:
                block = self._row[0].result(_TICK_SECONDS)
            except TimeoutError:
                yield b""
                continue
            except (BaseError, OSError) as error:
                raise self._store.error(self._file.place, error) from None
            self._row.popleft()
            self._fill()
            yield block

    def close(self) -> None:
        """Give up what is under way."""
        for waiting in self._row:
            waiting.cancel()

    def _fill(self) -> None:
        while len(self._row) < _AHEAD and self._next < self._file.size:
            end = min(self._next + self._store.range_bytes, self._file.size)
            self._row.append(self._store.range(self._file, self._next, end))
            self._next = end


async def _given_up() -> None:
    """End every request that is still under way."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _promised(file: SourceFile, promised: Manifest | None, where: str) -> SourceFile:
    """The file with the digest that a manifest beside it promises."""
    entry = promised.files.get(file.name) if promised is not None else None
    if entry is None:
        return file
    if entry.bytes != file.size:
        raise ChecksumMismatch(
            f"{where}: {file.name} has {file.size} bytes, and {manifests.NAME} there promises {entry.bytes}."
        )
    return replace(file, sha256=entry.sha256)


def _hidden(name: str) -> bool:
    """What stands for a folder in some stores, and what hides itself."""
    return not name or name.endswith("/") or any(part.startswith(".") for part in name.split("/"))


def _name(file: SourceFile) -> str:
    return file.name
