"""The states of all sequences and of prefixes on one device, and the copies from one to the other.

Invariants: allocated once. Rows `[0, sequences)` are those of slots, snapshots lie behind them. Copies run on the
stream of the steps and wait for nothing: what a step reads was there before it, and what it writes comes after.
Knows nothing of prefixes and of who has which slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_kernels.pages import copy_pages
from stoker_runtime.executor.arena import upload

Moves = Sequence[tuple[int, int]]


def by_row(arena: torch.Tensor) -> torch.Tensor:
    """States `[layers, rows, …]` as words, row by row, the same memory: `[rows, layers, words]`."""
    flat = arena.flatten(2)
    words = flat.view(torch.int64 if flat.shape[-1] * flat.itemsize % 8 == 0 else torch.uint8)
    return words.transpose(0, 1)


class StateCopies:
    """Copies between rows of `states`, as `executor.arena.state_arena` makes them."""

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        self._rows = [by_row(each) for each in states]

    def run(self, *moves: Moves) -> None:
        """(from, to) of each list at once, the lists one after the other."""
        for pairs in moves:
            if pairs:
                placed = upload(pairs, self._rows[0].device)
                for rows in self._rows:
                    copy_pages(rows, rows, placed)

    def rehearse(self) -> None:
        """Copy one row onto itself."""
        if self._rows:
            self.run(((0, 0),))
