"""The states of all sequences and of prefixes on one device, and the copies from one to the other, and to the host.

Invariants: allocated once. Rows `[0, sequences)` are those of slots, snapshots lie behind them. Copies run on the
stream of the steps and wait for nothing: what a step reads was there before it, and what it writes comes after. Those
to and from the host run as those of pages do, a layer at a time (`executor/page_swap.py`).
Knows nothing of prefixes and of who has which slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from stoker_kernels.pages import copy_pages
from stoker_runtime.executor.arena import upload
from stoker_runtime.step.batch import Batch

Moves = Sequence[tuple[int, int]]


def by_row(arena: torch.Tensor) -> torch.Tensor:
    """States `[layers, rows, …]` as words, row by row, the same memory: `[rows, layers, words]`."""
    flat = arena.flatten(2)
    words = flat.view(torch.int64 if flat.shape[-1] * flat.itemsize % 8 == 0 else torch.uint8)
    return words.transpose(0, 1)


class Swap(Protocol):
    """Host memory of one of the states' tensors; a unit is a layer of a row, those of a host row side by side."""

    def move(self, outs: Moves, ins: Moves) -> None:
        """Copy `outs` (unit of the device, of the host), then `ins` (of the host, of the device)."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


class StateCopies:
    """Copies between rows of `states`, as `executor.arena.state_arena` makes them."""

    def __init__(self, states: Sequence[torch.Tensor], swaps: Sequence[Swap] = ()) -> None:
        """`swaps`: one for each of the states, or none."""
        self._rows = [by_row(each) for each in states]
        self._layers, self._count = states[0].shape[:2] if states else (0, 0)
        self._swaps = swaps

    def run(self, batch: Batch) -> None:
        """What of a batch moves states, in its order."""
        if batch.state_outs:
            self._swap([(layer * self._count + row, host * self._layers + layer)
                        for row, host in batch.state_outs for layer in range(self._layers)], ())  # fmt: skip
        self._copy(batch.state_saves)
        self._copy(batch.state_loads)
        if batch.state_ins:
            self._swap((), [(host * self._layers + layer, layer * self._count + slot)
                            for host, slot in batch.state_ins for layer in range(self._layers)])  # fmt: skip

    def rehearse(self) -> None:
        """Copy one row onto itself."""
        if self._rows:
            self._copy(((0, 0),))

    def close(self) -> None:
        """Let go of the host's memory. Idempotent."""
        for swap in self._swaps:
            swap.close()

    def _copy(self, pairs: Moves) -> None:
        """(from, to), all at once."""
        if pairs:
            placed = upload(pairs, self._rows[0].device)
            for rows in self._rows:
                copy_pages(rows, rows, placed)

    def _swap(self, outs: Moves, ins: Moves) -> None:
        for swap in self._swaps:
            swap.move(outs, ins)
