"""Files into verified partial files: resume, retry with back-off, hash while writing.

Invariants: a partial file is named by what identifies its content, so bytes of another commit are never
continued; a file counts as done only after its digest was compared; every wait ends when told to stop or
when the deadline is over. Knows nothing of manifests and publishing.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker_runtime.fetch.contain import open_own
from stoker_runtime.fetch.errors import ChecksumMismatch, FetchFailed, HubUnreachable, Interrupted, VolumeFull
from stoker_runtime.fetch.manifest import ManifestFile
from stoker_runtime.fetch.progress import Progress, size
from stoker_runtime.fetch.source import Source, SourceFile, Transient
from stoker_runtime.fetch.volume import free_bytes, os_errors


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try: failures in a row without a byte of progress, back-off in seconds, and the deadline.

    The deadline is `base_seconds` plus the bytes at `min_bytes_per_second`: a large model gets more time, a
    stuck one ends.
    """

    failures: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    base_seconds: float = 600.0
    min_bytes_per_second: float = 512 * 1024

    def deadline(self, count: int) -> float:
        """The time in seconds that `count` bytes may take."""
        return self.base_seconds + count / self.min_bytes_per_second

    def wait(self, failures: int, asked: float) -> float:
        """Seconds before the next attempt: what the server asked for, else doubling, with jitter."""
        if asked:
            return asked
        return min(self.first_wait * 2.0 ** (failures - 1), self.longest_wait) * random.uniform(0.75, 1.25)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Part:
    """A partial file on disk with its running digests."""

    def __init__(self, path: Path, file: SourceFile) -> None:
        self.path = path
        self._file = file
        self.bytes = 0
        self._sha256: _Digest
        self._git: _Digest
        self._restart_digests()

    def load(self, stop: threading.Event) -> int:
        """Hash what an earlier run left; returns its size in bytes, 0 when it is of no use."""
        if self.path.exists() and (not self._file.identity or self.path.stat().st_size > self._file.size):
            self.path.unlink()
        if self.path.exists():
            with open(self.path, "rb", buffering=0, opener=open_own) as stream:
                while block := stream.read(1 << 20):
                    if stop.is_set():
                        raise Interrupted("Stopped while reading a partial file.")
                    self._count(block)
        return self.bytes

    def reset(self) -> None:
        """Start again at byte 0."""
        self.path.unlink(missing_ok=True)
        self.bytes = 0
        self._restart_digests()

    def append(self, handle: int, block: bytes) -> None:
        """Write `block` at the end through the open file descriptor `handle`."""
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(handle, rest) :]
        self._count(block)

    def finish(self) -> ManifestFile:
        """Compare the digests and return the file's manifest entry, or raise ChecksumMismatch."""
        found = self._sha256.hexdigest()
        if self._file.sha256 and found != self._file.sha256:
            raise ChecksumMismatch(f"{self._file.name} arrived with sha256 {found} instead of {self._file.sha256}.")
        if self._file.git_blob and self._git.hexdigest() != self._file.git_blob:
            raise ChecksumMismatch(f"{self._file.name} arrived with other bytes than the commit's.")
        with open(self.path, "rb", opener=open_own) as stream:
            os.fsync(stream.fileno())
        return ManifestFile(found, self.bytes, self.path.stat().st_mtime_ns)

    def _restart_digests(self) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % max(self._file.size, 0), usedforsecurity=False)

    def _count(self, block: bytes) -> None:
        self.bytes += len(block)
        self._sha256.update(block)
        if self._file.git_blob:
            self._git.update(block)


class Downloader:
    """Fetches files of one source into one work folder."""

    def __init__(
        self, source: Source, work: Path, progress: Progress, patience: Patience, stop: threading.Event
    ) -> None:
        self._source = source
        self._work = work
        self._progress = progress
        self._patience = patience
        # Set from outside, and here when one file failed for good: the run ends, the other files need not go
        # on.
        self._stop = stop
        self._deadline = 0.0
        self._room = 0

    def present(self, files: Sequence[SourceFile]) -> int:
        """How many bytes of `files` earlier runs left here that may be continued."""
        sizes = [self._path(file).stat().st_size for file in files if file.identity and self._path(file).exists()]
        return sum(sizes)

    def fetch(self, files: Sequence[SourceFile], parallel: int) -> dict[str, tuple[ManifestFile, Path]]:
        """Fetch all `files`, at most `parallel` at a time. Returns name → manifest entry and partial file.

        Raises the first error; what the others have by then stays on disk.
        """
        total = sum(max(file.size, 0) for file in files)
        self._progress.enter("download", total)
        self._deadline = time.monotonic() + self._patience.deadline(total)
        self._room = free_bytes(self._work)
        # Large files first: the last one to finish is then a small one.
        ordered = sorted(files, key=lambda file: -file.size)
        with ThreadPoolExecutor(parallel, thread_name_prefix="fetch") as pool:
            futures = {pool.submit(self._one, file): file for file in ordered}
            _, pending = wait(futures, return_when=FIRST_EXCEPTION)
            if pending:
                self._stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):
            raise error
        return {file.name: (future.result(), self._path(file)) for future, file in futures.items()}

    def _one(self, file: SourceFile) -> ManifestFile:
        """One file to its end: attempts until it is verified, or until patience is over."""
        path = self._path(file)
        part = _Part(path, file)
        failures = mismatches = 0
        with os_errors(path):
            self._progress.kept(part.load(self._stop))
            while True:
                before = part.bytes
                try:
                    self._attempt(file, part)
                    return part.finish()
                except ChecksumMismatch:
                    # Once may be the network, or a partial file that a crash tore; twice is the source.
                    mismatches += 1
                    if mismatches == 2:
                        raise
                    self._drop(part)
                except Transient as trouble:
                    failures = 1 if part.bytes > before else failures + 1
                    if failures >= self._patience.failures:
                        raise trouble.error from None
                    self._sleep(self._patience.wait(failures, trouble.after))

    def _attempt(self, file: SourceFile, part: _Part) -> None:
        """Bring the partial file to its full size, from where it is."""
        if file.size >= 0 and part.bytes == file.size and part.path.exists():
            return
        if part.bytes and file.size < 0:
            self._drop(part)
        with self._source.open(file, part.bytes) as body:
            if body.offset != part.bytes:
                self._drop(part)
            handle = open_own(part.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                for block in body.chunks:
                    self._check_time(file)
                    self._check_size(file, part, len(block))
                    part.append(handle, block)
                    self._progress.moved(len(block))
            finally:
                os.close(handle)
        if file.size >= 0 and part.bytes < file.size:
            raise Transient(
                HubUnreachable(f"{file.name}: the connection ended after {size(part.bytes)} of {size(file.size)}.")
            )

    def _check_time(self, file: SourceFile) -> None:
        if self._stop.is_set():
            raise Interrupted("Stopped; the next run goes on from here.")
        if time.monotonic() > self._deadline:
            raise FetchFailed(
                f"{file.name} is not there in the time that its size allows; the next run goes on from here."
            )

    def _check_size(self, file: SourceFile, part: _Part, more: int) -> None:
        """A body ends where the listing said; one of unknown length before it has filled the volume."""
        if 0 <= file.size < part.bytes + more:
            raise ChecksumMismatch(f"{file.name} arrived with more than the {file.size} bytes that were promised.")
        if file.size < 0 and part.bytes + more > self._room:
            self._drop(part)
            raise VolumeFull(f"{file.name}, of which its server tells no size, is larger than the volume's free space.")

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(min(seconds, max(self._deadline - time.monotonic(), 0.0))):
            raise Interrupted("Stopped; the next run goes on from here.")
        if time.monotonic() > self._deadline:
            raise FetchFailed("The source did not recover in the time that the model's size allows.")

    def _drop(self, part: _Part) -> None:
        self._progress.kept(-part.bytes)
        part.reset()

    def _path(self, file: SourceFile) -> Path:
        return self._work / (file.identity or hashlib.sha256(file.name.encode()).hexdigest()[:24])
