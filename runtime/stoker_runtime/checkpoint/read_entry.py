"""Reads the bytes of an entry, whether they lie in one piece or as runs with gaps between them.

Invariants: a file that ends too early is a ModelError that says where. Runs with small gaps are read together with
them, because a system call takes longer than a gap's bytes.
Knows nothing of numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError

# A gap of so many bytes is copied in about the time that a read of its own would take.
SMALL_GAP = 16 * 1024
TOGETHER_BYTES = 1024 * 1024


def read_entry(descriptor: int, entry: TensorEntry, start: int, view: memoryview) -> None:
    """Fill `view` with the entry's bytes from `start` on, the runs of one with a stride end to end.

    `descriptor` is of the entry's file. Raises ModelError if it ends before `view` is full.
    """
    if not entry.stride:
        fill(descriptor, entry.file, entry.offset + start, view)
        return
    run, done = entry.run, 0
    while done < len(view):
        row, within = divmod(start + done, run)
        whole = 0 if within else min((len(view) - done) // run, TOGETHER_BYTES // entry.stride)
        if whole > 1 and entry.stride - run <= SMALL_GAP:
            _together(descriptor, entry, row, whole, view[done : done + whole * run])
            done += whole * run
            continue
        count = min(run - within, len(view) - done)
        fill(descriptor, entry.file, entry.offset + row * entry.stride + within, view[done : done + count])
        done += count


def _together(descriptor: int, entry: TensorEntry, row: int, count: int, view: memoryview) -> None:
    """`count` whole runs, read with their gaps."""
    run, stride = entry.run, entry.stride
    read = np.empty(count * stride, dtype=np.uint8)
    # Behind the last run the file may end.
    span = (count - 1) * stride + run
    fill(descriptor, entry.file, entry.offset + row * stride, read.data[:span])
    np.frombuffer(view, dtype=np.uint8).reshape(count, run)[:] = read.reshape(count, stride)[:, :run]


def fill(descriptor: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` from `offset` of an open file. Raises ModelError if it ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise ModelError(f"{path}: ended at byte {offset + done} while {len(view) - done} more were due.")
        done += got
