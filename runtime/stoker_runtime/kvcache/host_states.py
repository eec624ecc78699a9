"""States in host memory, beside the pages of the host pool: those of preempted sequences, and those of prefixes whose
pages the device gave up.

A step copies `outs` (row of the device, host row) before all else, and `ins` (host row, slot) after all other copies
between states. So a slot, or the row of a snapshot, is free for others in the step that copies it out.

Invariants: a host row is free, has one key, is held by one stored sequence, or is spoken for by the step to come. One
with a key is given up with the host page of that key, and when rows are short the least recently used one. What a step
brings back is overwritten by no copy of that step. Every call is O(1).
Knows nothing of pages, sequences, and of what a state is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

Moves = tuple[tuple[int, int], ...]


class HostStates:
    """`count` rows. `tokens`: bringing one back takes as long as computing so many."""

    def __init__(self, count: int, tokens: float = 0.0) -> None:
        self.tokens = tokens
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._keyed: OrderedDict[bytes, int] = OrderedDict()
        """Those of prefixes, the least recently used first."""
        self._stored: set[int] = set()
        """Those of preempted sequences."""
        self._leaving: set[int] = set()
        """Those that the step to come reads, and that are free after it."""
        self._reading: set[int] = set()
        """All that the step to come reads."""
        self._outs: dict[int, int] = {}
        """Of the step to come: the row of the device that goes to a host row."""
        self._ins: list[tuple[int, int]] = []

    def row_of(self, key: bytes) -> int | None:
        """Where the states behind this prefix are, which are the most recently used ones now; or None."""
        row = self._keyed.get(key)
        if row is not None:
            self._keyed.move_to_end(key)
        return row

    def store(self, slot: int) -> int | None:
        """Copy the states of `slot` to a row that its sequence holds; None when there is no room."""
        row = self._take(slot)
        if row is not None:
            self._stored.add(row)
        return row

    def drop(self, row: int) -> None:
        """A sequence gives up what it stored, or was brought back from there."""
        self._stored.remove(row)
        self._let_go(row)

    def keep(self, key: bytes, row: int) -> None:
        """Copy a snapshot of the device, whose row is free after that, unless it is here."""
        if key in self._keyed:
            self._keyed.move_to_end(key)
        elif (here := self._take(row)) is not None:
            self._keyed[key] = here

    def page_given_up(self, key: bytes) -> None:
        """The host page at whose end a state would be is gone."""
        if (row := self._keyed.pop(key, None)) is not None:
            self._let_go(row)

    def bring(self, row: int, slot: int) -> None:
        """Copy a row to a slot: nothing of the step to come goes to that row."""
        self._reading.add(row)
        self._ins.append((row, slot))

    def take_moves(self) -> tuple[Moves, Moves]:
        """The copies of the step that is launched next: `outs`, then `ins`."""
        outs, ins = tuple((source, row) for row, source in self._outs.items()), tuple(self._ins)
        self._outs, self._ins = {}, []
        self._free += self._leaving
        self._leaving, self._reading = set(), set()
        return outs, ins

    def clear(self) -> None:
        """Forget all, launched or not, but what sequences stored: those rows are dropped one by one."""
        for key in list(self._keyed):
            self.page_given_up(key)
        self._outs, self._ins = {}, []
        self._free += self._leaving
        self._leaving, self._reading = set(), set()

    def check(self, stored: Iterable[int], is_cached: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless rows are free, leaving, of one key with a page, or of the `stored` sequences."""
        held = [*self._free, *self._leaving, *self._keyed.values(), *self._stored]
        assert sorted(held) == list(range(self._count)), "rows of states on the host are lost or shared"
        assert sorted(stored) == sorted(self._stored), "states are stored for nobody, or not for somebody"
        assert set(self._outs) <= {*self._keyed.values(), *self._stored, *self._leaving}, "a copy for nobody"
        assert all(map(is_cached, self._keyed)), "states on the host outlived their page"

    def _take(self, source: int) -> int | None:
        """A row to which the step to come copies row `source` of the device; None when there is none."""
        if not self._free:
            oldest = next((key for key, row in self._keyed.items() if row not in self._reading), None)
            if oldest is None:
                return None
            self.page_given_up(oldest)
        row = self._free.pop()
        self._outs[row] = source
        return row

    def _let_go(self, row: int) -> None:
        if row in self._reading:
            self._leaving.add(row)
            return
        self._outs.pop(row, None)
        self._free.append(row)
