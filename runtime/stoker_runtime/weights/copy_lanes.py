"""Moves bytes of files to their final place, many at a time.

Invariants: a worker reads with pread, never by mapping, so the host's resident memory stays at the lanes' buffers;
on CUDA each lane has its own stream and two pinned buffers, so reading and copying overlap. Destinations are
contiguous. After `join` everything submitted is ordered before later work on the current stream. What was uploaded
ahead is taken from there, on the current stream, and given back at the end; lanes are made only if a file is read.
Knows nothing of parameters, layers or block formats.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from stoker_runtime.checkpoint.read_entry import read_entry
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.weights.upload_ahead import UploadAhead
from stoker_runtime.weights.uploaded import uploaded

# 4 MiB: long enough for full PCIe speed, short enough that two pinned buffers for each of 16 workers stay small.
CHUNK_BYTES = 4 * 1024 * 1024
MAX_WORKERS = 16

PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What is copied as it is: fp8 and packed integers never become another dtype here, because their values need scales.
WORD_DTYPES = {"I32": torch.int32}
BYTE_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F8_E8M0": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
READABLE_DTYPES = PLAIN_DTYPES | WORD_DTYPES | BYTE_DTYPES

log = logging.getLogger(__name__)


def lock_pages(memory: Tensor) -> None:
    """Keep host memory where it is, so that the device's copy engines reach it. Raises torch.cuda.CudaError."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def locked_pages(count: int) -> Tensor:
    """So many new bytes of host memory that `lock_pages` locked. Raises OSError, torch.cuda.CudaError."""
    memory = mmap.mmap(-1, count)
    with suppress(OSError):
        # A hint that some kernels do not take: with larger pages there are fewer of them to lock.
        memory.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    lock_pages(host)
    return host


def unlock_pages(memory: Tensor) -> None:
    """The end of `lock_pages`: before its memory goes, and after the copies. Raises torch.cuda.CudaError."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


class Lane:
    """What one worker needs: on CUDA a stream and two pinned buffers used in turn, on the CPU one buffer."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        count = 1 if self.stream is None else 2
        # Pages of their own: pinning two buffers that share a page fails.
        self._buffers = [torch.frombuffer(mmap.mmap(-1, CHUNK_BYTES), dtype=torch.uint8) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if self.stream is not None else []
        self._turn = 0
        if self.stream is not None:
            # Pinned by registration and not by torch's allocator, which would keep the memory for good.
            for buffer in self._buffers:
                lock_pages(buffer)

    def read(self, files: FileTable, entry: TensorEntry, start: int, count: int) -> Tensor:
        """Bytes `[start, start + count)` of a tensor, in a buffer that is free of earlier copies."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._copied:
            self._copied[self._turn].synchronize()
        buffer = self._buffers[self._turn][:count]
        files.read_into(entry, start, buffer)
        return buffer

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy from this lane's buffer, with conversion. On CUDA asynchronous, on the lane's stream."""
        if self.stream is None:
            destination.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            if source.dtype != destination.dtype:
                # Converted on the device: converting on the host would take a pass over the bytes more.
                source = source.to(destination.device, non_blocking=True)
            destination.copy_(source, non_blocking=True)
            self._copied[self._turn].record(self.stream)

    def copy_now(self, source: Tensor, destination: Tensor) -> None:
        """Copy from memory that is no lane's, with conversion; done when this returns."""
        if self.stream is None:
            destination.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            destination.copy_(source)

    def close(self) -> None:
        """Wait for the copies and unpin the buffers."""
        if self.stream is not None:
            self.stream.synchronize()
            for buffer in self._buffers:
                unlock_pages(buffer)


class FileTable:
    """Open files by path; pread makes one descriptor safe to share between threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def open(self, path: Path) -> None:
        """Open `path` unless it is open."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, entry: TensorEntry, start: int, buffer: Tensor) -> None:
        """Fill the byte tensor `buffer` from byte `start` of an entry. Raises ModelError if its file ends before."""
        read_entry(self._descriptors[entry.file], entry, start, buffer.numpy().data)

    def close(self) -> None:
        """Close all."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class CopyLanes:
    """A pool of workers that fill destinations. A context manager: leaving it waits and frees the buffers."""

    def __init__(self, device: torch.device, ahead: UploadAhead | None = None) -> None:
        """`ahead` holds files, or parts of them, on this device already."""
        workers = min(MAX_WORKERS, max(2, os.cpu_count() or 2))
        self._device = device
        self._ahead = ahead
        self._files = FileTable()
        self._lanes: list[Lane] = []
        self._free: SimpleQueue[Lane] = SimpleQueue()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="stoker-weights")
        self._workers = workers

    def __enter__(self) -> CopyLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        for lane in self._lanes:
            lane.close()
        self._files.close()
        if self._ahead is not None:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            log.info("weights: %s", self._ahead.describe())
            self._ahead.close()

    def submit_plain(self, entry: TensorEntry, destination: Tensor) -> list[Future[None]]:
        """Fill `destination` (contiguous, the entry's shape) from an entry of plain numbers, converting the dtype.

        FP8 goes to FP8 and words to words only.
        """
        dtype = READABLE_DTYPES[entry.encoding]
        step = CHUNK_BYTES // dtype.itemsize
        flat = destination.view(-1)
        if self._ahead is not None and not entry.runs and (there := uploaded(self._ahead, entry, dtype)) is not None:
            flat.copy_(there)
            return []
        self._open(entry.file)
        return [
            self._pool.submit(self._plain, entry, dtype, start, flat[start : start + step])
            for start in range(0, flat.numel(), step)
        ]

    def submit_decoded(
        self, entry: TensorEntry, destination: Tensor, row_group: int, decode: Callable[[Tensor], Tensor]
    ) -> list[Future[None]]:
        """Fill `destination` from an entry in another encoding, `decode(bytes) -> fp32 numbers` of whole rows.

        Work is cut at multiples of `row_group` rows; a vector is one row, or with a row group as many as it is long.
        """
        rows = destination.shape[0] if destination.dim() > 1 or row_group > 1 else 1
        table = destination.view(rows, -1)
        row_bytes = entry.num_bytes // rows
        step = row_group * max(1, CHUNK_BYTES // (row_group * table.shape[1] * 4))
        self._open(entry.file)
        return [
            self._pool.submit(self._decoded, entry, start, row_bytes, table[start : start + step], decode)
            for start in range(0, rows, step)
        ]

    def fence(self) -> None:
        """Order copies submitted from now on behind the current stream: a destination may be recycled memory."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            for lane in self._lanes:
                if lane.stream is not None:
                    lane.stream.wait_stream(current)

    def join(self, futures: list[Future[None]]) -> None:
        """Wait until the workers are done; later work on the current stream sees the result. Re-raises their errors."""
        for future in futures:
            future.result()
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            for lane in self._lanes:
                if lane.stream is not None:
                    current.wait_stream(lane.stream)

    def _open(self, file: Path) -> None:
        """Before anything is read: open the file and make the lanes, whose pinned buffers take a tenth of a second."""
        self._files.open(file)
        if not self._lanes:
            self._lanes = [Lane(self._device) for _ in range(self._workers)]
            for lane in self._lanes:
                self._free.put(lane)
            self.fence()

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        lane = self._free.get()
        try:
            # The mode belongs to a thread: without it here, tensors of a caller in inference mode refuse the copy.
            with torch.inference_mode():
                yield lane
        finally:
            self._free.put(lane)

    def _plain(self, entry: TensorEntry, dtype: torch.dtype, start: int, destination: Tensor) -> None:
        count = destination.numel() * dtype.itemsize
        if destination.dtype == dtype and destination.device.type == "cpu":
            target = destination.view(torch.uint8)
            self._files.read_into(entry, start * dtype.itemsize, target)
            return
        with self._lane() as lane:
            source = lane.read(self._files, entry, start * dtype.itemsize, count)
            lane.copy(source.view(dtype), destination)

    def _decoded(
        self,
        entry: TensorEntry,
        row: int,
        row_bytes: int,
        destination: Tensor,
        decode: Callable[[Tensor], Tensor],
    ) -> None:
        raw = torch.empty(destination.shape[0] * row_bytes, dtype=torch.uint8)
        self._files.read_into(entry, row * row_bytes, raw)
        numbers = decode(raw).view(destination.shape)
        with self._lane() as lane:
            lane.copy_now(numbers, destination)
