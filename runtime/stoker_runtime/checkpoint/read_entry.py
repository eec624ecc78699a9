"""Reads the bytes of an entry, whether they lie in one piece or as runs with gaps between them.

Invariants: a file that ends too early is a ModelError that says where. Runs with small gaps are read together with
them, because a system call takes longer than a gap's bytes.
Knows nothing of numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError

# A gap of so many bytes is copied, from the pages that another rank needs anyway, in about the time that a read of its
# own would take: 6 µs where many threads take turns with Python's lock.
SMALL_GAP = 64 * 1024
TOGETHER_BYTES = 1024 * 1024


def read_entry(descriptor: int, entry: TensorEntry, start: int, view: memoryview) -> None:
    """Fill `view` with the entry's bytes from `start` on, the runs of a window end to end.

    `descriptor` is of the entry's file. Raises ModelError if it ends before `view` is full.
    """
    if not entry.runs:
        fill(descriptor, entry.file, entry.offset + start, view)
        return
    turn, done = entry.turn, 0
    while done < len(view):
        row, within = divmod(start + done, turn)
        together = entry.stride and not within and entry.stride - turn <= SMALL_GAP
        whole = min((len(view) - done) // turn, TOGETHER_BYTES // entry.stride) if together else 0
        if whole > 1:
            _together(descriptor, entry, row, whole, view[done : done + whole * turn])
            done += whole * turn
            continue
        for distance, count in _rest(entry.runs, within):
            count = min(count, len(view) - done)
            fill(descriptor, entry.file, entry.offset + row * entry.stride + distance, view[done : done + count])
            done += count


def _rest(runs: tuple[tuple[int, int], ...], skipped: int) -> Iterator[tuple[int, int]]:
    """The runs without their first `skipped` bytes."""
    for distance, count in runs:
        if skipped < count:
            yield distance + skipped, count - skipped
        skipped = max(skipped - count, 0)


def _together(descriptor: int, entry: TensorEntry, row: int, count: int, view: memoryview) -> None:
    """`count` whole turns, read with their gaps."""
    turn, stride = entry.turn, entry.stride
    read = np.empty(count * stride, dtype=np.uint8)
    # Behind the last run the file may end.
    span = (count - 1) * stride + max(distance + length for distance, length in entry.runs)
    fill(descriptor, entry.file, entry.offset + row * stride, read.data[:span])
    found, at = np.frombuffer(view, dtype=np.uint8).reshape(count, turn), 0
    for distance, length in entry.runs:
        found[:, at : at + length] = read.reshape(count, stride)[:, distance : distance + length]
        at += length


def fill(descriptor: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` from `offset` of an open file. Raises ModelError if it ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise ModelError(f"{path}: ended at byte {offset + done} while {len(view) - done} more were due.")
        done += got
