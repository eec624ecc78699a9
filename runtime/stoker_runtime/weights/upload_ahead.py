"""Brings files of weights to the GPU before anyone asks for them: while torch is imported, which takes seconds.

Readers fill pinned buffers with pread and copy them into one block of device memory, chunk by chunk in the files'
order, as far as there is room. Whoever loads weights takes bytes from the block, waiting for those still on their way,
and closes it.

Invariants: nothing here fails a start: what the block cannot give, for any reason, is read from the file, and `failure`
says why. Bytes are given only once they are complete, and while the file is the one they came from. The block's size is
known to whoever plans memory, and is as large as `room` allows at most.
Knows nothing of torch, tensors or formats.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from stoker_runtime.process.clock import process_age
from stoker_runtime.weights.cuda_driver import DriverError

# 16 MiB: a reader asks for the interpreter's lock twice a chunk, and whoever imports holds it for up to 5 ms.
CHUNK_BYTES = 16 * 1024 * 1024
MAX_READERS = 16
ALIGNMENT = 256
# The driver maps memory in pages of 2 MiB: a block of whole pages takes exactly its size.
PAGE_BYTES = 2 * 1024 * 1024
GIB = 1024**3


class Driver(Protocol):
    """What is used of `CudaDriver`."""

    def enter(self) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def allocate(self, count: int) -> int: ...
    def free(self, address: int) -> None: ...
    def pinned(self, count: int) -> AbstractContextManager[memoryview]: ...
    def copy(self, address: int, source: memoryview) -> None: ...


class Stamp(NamedTuple):
    """By what a file is known to be the one that was read."""

    device: int
    inode: int
    size: int
    modified_ns: int


class Source(NamedTuple):
    """An open file, where its first byte goes in the block, the number of its first chunk among all, and how many bytes
    of it the block has room for.
    """

    descriptor: int
    stamp: Stamp
    place: int
    first_chunk: int
    length: int


class Chunk(NamedTuple):
    """A piece of a file on its way."""

    number: int
    source: Source
    offset: int
    length: int


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file's status."""
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def is_same(file: Path, stamp: Stamp) -> bool:
    """Whether the file of this name still has the stamp."""
    try:
        return stamp_of(file.stat()) == stamp
    except OSError:
        return False


class UploadAhead:
    """The bytes of some files in one block of device memory, or on their way there."""

    def __init__(self, files: list[Path], room: Callable[[int, int, int], int]) -> None:
        """`room(free, total, files)` says how many bytes the block may take of the device's, for files of so many."""
        self._files = files
        self._room = room
        self._driver: Driver | None = None
        self._block = 0
        self._size = 0
        self._left = 0
        self._sources: dict[Path, Source] = {}
        self._waiting: deque[Chunk] = deque()
        self._complete: list[bool] = []
        self._news = threading.Condition()
        self._decided, self._ended = threading.Event(), threading.Event()
        self.failure = ""
        self.began_at = self.seconds = 0.0
        self.waited_seconds = 0.0

    def run(self, open_driver: Callable[[], Driver]) -> None:
        """Create the driver's context and upload; the whole of a thread's life."""
        began = time.perf_counter()
        try:
            with ExitStack() as opened:
                self._reserve(open_driver(), opened)
                self._decided.set()
                self.began_at, began = process_age(), time.perf_counter()
                count = min(MAX_READERS, max(2, os.cpu_count() or 2), len(self._waiting))
                readers = [threading.Thread(target=self._read, daemon=True) for _ in range(count)]
                for reader in readers:
                    reader.start()
                for reader in readers:
                    reader.join()
        except (OSError, DriverError) as error:
            self._fail(str(error))
        finally:
            if not self._complete or not all(self._complete):
                self._fail("the upload ended early")
            self.seconds = time.perf_counter() - began
            self._decided.set()
            self._ended.set()

    @property
    def reserved(self) -> int:
        """Bytes of the device that are not free before `close` and are free after; waits until they are taken."""
        self._decided.wait()
        return self._size

    def address(self, file: Path, offset: int, count: int) -> int | None:
        """Where `count` bytes from `offset` of `file` are on the device, complete; None to have them read."""
        self._decided.wait()
        source = self._sources.get(file)
        if source is None or self.failure or not count or offset + count > source.length:
            return None
        if not is_same(file, source.stamp):
            self._fail(f"{file.name} has changed since it was uploaded")
            return None
        first = source.first_chunk
        chunks = range(first + offset // CHUNK_BYTES, first + (offset + count - 1) // CHUNK_BYTES + 1)
        began = time.perf_counter()
        with self._news:
            self._news.wait_for(lambda: self.failure or all(self._complete[number] for number in chunks))
        self.waited_seconds += time.perf_counter() - began
        return None if self.failure else self._block + source.place + offset

    def close(self) -> None:
        """End the readers and give the block back; what was taken from it must have been copied. Idempotent."""
        self._waiting.clear()
        self._ended.wait()
        if self._driver is not None and self._block:
            self._driver.enter()
            self._driver.free(self._block)
        self._block = self._size = 0
        self._sources = {}

    def describe(self) -> str:
        """Which way the weights came, for the log."""
        if self.failure:
            return f"read from the files: {self.failure}"
        rest = f", {self._left / GIB:.2f} GiB without room read from the files" if self._left else ""
        return (
            f"{self._size / GIB:.2f} GiB uploaded ahead in {self.seconds:.2f} s from {self.began_at:.2f} s on, "
            f"{self.waited_seconds:.2f} s waited for{rest}"
        )

    def _reserve(self, driver: Driver, opened: ExitStack) -> None:
        """Open the files, take the block, and queue the chunks. Raises DriverError where it cannot or should not be."""
        driver.enter()
        chunks: deque[Chunk] = deque()
        sources: dict[Path, Source] = {}
        stamps: list[tuple[Path, int, Stamp]] = []
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            stamps.append((file, descriptor, stamp_of(os.fstat(descriptor))))
        total = sum(stamp.size for *_, stamp in stamps)
        if not total:
            raise DriverError("there are no safetensors")
        room = max(0, self._room(*driver.memory(), total)) // PAGE_BYTES * PAGE_BYTES
        size = 0
        for file, descriptor, stamp in stamps:
            fits = min(stamp.size, max(0, room - size))
            length = fits if fits == stamp.size else fits // CHUNK_BYTES * CHUNK_BYTES
            sources[file] = source = Source(descriptor, stamp, size, len(chunks), length)
            for offset in range(0, length, CHUNK_BYTES):
                chunks.append(Chunk(len(chunks), source, offset, min(CHUNK_BYTES, length - offset)))
            size += -(-length // ALIGNMENT) * ALIGNMENT
        if not chunks:
            raise DriverError(f"{room / GIB:.2f} GiB beside the weights are allowed, of {total / GIB:.2f}")
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._block = driver.allocate(size)
        self._left = total - sum(source.length for source in sources.values())
        self._driver, self._size, self._sources = driver, size, sources
        self._complete = [False] * len(chunks)
        self._waiting = chunks

    def _read(self) -> None:
        """A reader: the next chunk until there is none, or one failed."""
        driver = self._driver
        assert driver is not None, "readers start after the block was taken"
        try:
            driver.enter()
            with driver.pinned(CHUNK_BYTES) as buffer:
                while (chunk := self._next()) is not None:
                    part = buffer[: chunk.length]
                    fill(chunk, part)
                    driver.copy(self._block + chunk.source.place + chunk.offset, part)
                    with self._news:
                        self._complete[chunk.number] = True
                        self._news.notify_all()
        except (OSError, DriverError) as error:
            self._fail(str(error))

    def _next(self) -> Chunk | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _fail(self, reason: str) -> None:
        self._waiting.clear()
        with self._news:
            self.failure = self.failure or reason
            self._news.notify_all()


def fill(chunk: Chunk, buffer: memoryview) -> None:
    """Read a chunk. Raises OSError where the file ends before it does."""
    done = 0
    while done < chunk.length:
        got = os.preadv(chunk.source.descriptor, [buffer[done:]], chunk.offset + done)
        if got == 0:
            raise OSError(f"a file ended at byte {chunk.offset + done} while it was uploaded")
        done += got
