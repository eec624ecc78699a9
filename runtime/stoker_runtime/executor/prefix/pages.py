"""The page table as the host knows it, and how many first pages the rows of a step have in common.

One row's pages are held up as the mark; of each slot it is kept on how many first pages it agrees with the mark, until
pages among those change. The least of a step's rows is what all have in common; where all agree equally far they may
have more in common, and the mark becomes one of them.

What a line holds behind its sequence's pages is what it held before, and never counts: the page that a sequence writes
its newest token to is no other's (`kvcache/manager.py`), so no two lines agree on that one.

Invariants: pure; a step whose rows and pages are those of the step before costs a comparison, one with another row a
minimum over its rows and that row's pages. Knows nothing of tensors, and of what is done with the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 64  # pages compared at a time: most lines agree on few or on none


class CommonPages:
    """Of `slots` lines of up to `pages` pages."""

    def __init__(self, slots: int, pages: int) -> None:
        self._table = np.zeros((slots, pages), dtype=np.int32)
        self._mark = np.zeros(pages, dtype=np.int32)
        self._agreed = np.zeros(slots, dtype=np.int32)
        self._known = np.zeros(slots, dtype=np.bool_)
        self._rows: Sequence[int] = ()
        self._common = 0

    def update(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Entries `[start, start + len(pages))` of a slot become `pages`."""
        self._table[slot, start : start + len(pages)] = pages
        if self._known[slot] and start <= self._agreed[slot]:
            self._known[slot] = False
            self._rows = ()

    def common(self, rows: Sequence[int]) -> int:
        """How many first pages the slots `rows` have in common, two at least, each of which decodes."""
        if rows != self._rows:
            slots = np.array(rows, dtype=np.int64)
            agreed = self._of(slots)
            if agreed.min() == agreed.max():
                self._mark[:] = self._table[slots[0]]
                self._known[:] = False
                agreed = self._of(slots)
            self._rows, self._common = rows, int(agreed.min())
        return self._common

    def _of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """On how many first pages each of these agrees with the mark."""
        unknown = slots[~self._known[slots]]
        if unknown.size:
            self._compare(unknown)
        return self._agreed[slots]

    def _compare(self, slots: npt.NDArray[np.int64]) -> None:
        self._known[slots] = True
        self._agreed[slots] = len(self._mark)
        for start in range(0, len(self._mark), BLOCK):
            differ = self._table[slots, start : start + BLOCK] != self._mark[start : start + BLOCK]
            ends = differ.any(axis=1)
            self._agreed[slots[ends]] = start + differ[ends].argmax(axis=1)
            slots = slots[~ends]
            if not slots.size:
                return
