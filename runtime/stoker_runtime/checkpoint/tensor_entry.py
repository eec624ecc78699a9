"""Where one tensor of a checkpoint lies: the common ground of the file formats.

Invariants: torch-free; an entry is made only after its bytes were checked to lie within the file.
Knows nothing of headers or of where the tensor goes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker_runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`num_bytes` at `offset` of `file` encode a row-major tensor of `shape`.

    `encoding` is safetensors' word for the dtype (F32, F16, BF16, F8_E4M3, …) or the name of a GGUF block type.
    Of a window of a larger tensor `runs` are its bytes, as (distance from `offset`, bytes); they begin anew each
    `stride` bytes, as those of some columns of a matrix do in each row (0: once, as those of some rows). The first
    `lead` numbers of each run's blocks are not part of it.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    encoding: str
    stride: int = 0
    lead: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def turn(self) -> int:
        """Bytes of all runs once, end to end."""
        return sum(count for _, count in self.runs)


def part_of(entry: TensorEntry, start: int, num_bytes: int, shape: tuple[int, ...]) -> TensorEntry:
    """Bytes `[start, start + num_bytes)` of an entry: some of its rows, of `shape` together; where runs begin anew,
    whole turns of them.
    """
    if not entry.runs:
        return replace(entry, shape=shape, offset=entry.offset + start, num_bytes=num_bytes)
    if entry.stride:
        turns, within = divmod(start, entry.turn)
        assert within == num_bytes % entry.turn == 0, "rows of a window of columns are whole turns"
        return replace(entry, shape=shape, offset=entry.offset + turns * entry.stride, num_bytes=num_bytes)
    return replace(entry, shape=shape, num_bytes=num_bytes, runs=tuple(_within(entry.runs, start, start + num_bytes)))


def _within(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of runs that lie end to end once read, what is in `[start, stop)` of that."""
    at = 0
    for distance, count in runs:
        first, last = max(start, at), min(stop, at + count)
        if first < last:
            yield distance + first - at, last - first
        at += count


def find_entry(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...], architecture: str) -> TensorEntry:
    """The entry called `name`. Raises ModelError where it is missing, with the nearest name, or has another shape.

    One thing may stand in a tensor of one.
    """
    entry = entries.get(name)
    if entry is None:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f" The nearest is {close[0]}." if close else ""
        raise ModelError(f"The checkpoint lacks tensor {name} {list(shape)} of a {architecture}.{hint}")
    if entry.shape == (1, *shape):
        return replace(entry, shape=shape)
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: tensor {name} is {list(entry.shape)}; the configuration asks for {list(shape)}."
        )
    return entry
