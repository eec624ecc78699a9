"""Which prefixes have their states kept beside their pages: copies of a sequence's states where a page ended.

A state stands for all tokens before it, so pages of a prefix are of use only together with a snapshot at their end. A
snapshot has a row of the device's states, behind those of the slots.

Invariants: a row is free or has one key, a key one row. Snapshots are given up with the page that their key names, and
when rows are short the least recently used one, those of sessions after all others. A step copies `saves` before all
else; which prefixes a step begins from is decided after the saves of it are, so none of these is overwritten by them.
Knows nothing of sequences, and of what a state is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

Moves = tuple[tuple[int, int], ...]


class Snapshots:
    """`count` rows from row number `first` on."""

    def __init__(self, count: int, first: int) -> None:
        self._rows = range(first, first + count)
        self._free = list(reversed(self._rows))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        """The least recently used first."""
        self._lasting: OrderedDict[bytes, int] = OrderedDict()
        """Those of sessions; at most half of all."""
        self._saves: dict[int, int] = {}
        """Of the step to come: the slot whose states go to a row."""

    @property
    def used(self) -> int:
        """Snapshots that there are."""
        return len(self._row_of) + len(self._lasting)

    def longest(self, keys: list[bytes], limit: int) -> int:
        """How many of the first `limit` pages with these keys a sequence need not compute."""
        while limit and keys[limit - 1] not in self._row_of and keys[limit - 1] not in self._lasting:
            limit -= 1
        return limit

    def use(self, key: bytes) -> int:
        """The row of a snapshot, which is the most recently used one now."""
        found = self._lasting if key in self._lasting else self._row_of
        found.move_to_end(key)
        return found[key]

    def save(self, key: bytes, slot: int) -> None:
        """Have the next step begin by keeping the states of `slot` under `key`, unless they are there."""
        if key in self._row_of or key in self._lasting:
            self.use(key)
            return
        if not self._free:
            self._give_up(next(iter(self._row_of or self._lasting)))
        row = self._free.pop()
        self._row_of[key] = row
        self._saves[row] = slot

    def keep(self, keys: Iterable[bytes]) -> None:
        """What is there of these keys belongs to a session: it outlives those that do not."""
        for key in keys:
            if key in self._row_of:
                self._lasting[key] = self._row_of.pop(key)
                if len(self._lasting) > len(self._rows) // 2:
                    oldest, row = self._lasting.popitem(last=False)
                    self._row_of[oldest] = row

    def demote(self, key: bytes) -> None:
        """Of little use from now on: the first to be given up."""
        if key in self._row_of:
            self._row_of.move_to_end(key, last=False)

    def page_given_up(self, key: bytes) -> None:
        """The page at whose end a snapshot would be is gone."""
        if key in self._row_of or key in self._lasting:
            self._give_up(key)

    def take_saves(self) -> Moves:
        """(slot, row) of the step that is launched next."""
        if not self._saves:
            return ()
        saves = tuple((slot, row) for row, slot in self._saves.items())
        self._saves = {}
        return saves

    def clear(self) -> None:
        """Forget all, for when nothing on the device can be trusted."""
        for key in [*self._row_of, *self._lasting]:
            self._give_up(key)

    def check(self, is_cached: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless each row is free or of one key, whose page is there."""
        held = [*self._row_of.values(), *self._lasting.values()]
        assert sorted(held + self._free) == list(self._rows), "rows of snapshots are lost or shared"
        assert not self._row_of.keys() & self._lasting.keys(), "a snapshot rests twice"
        assert set(self._saves) <= set(held), "states are saved for nobody"
        assert all(is_cached(key) for key in (*self._row_of, *self._lasting)), "a snapshot outlived its page"

    def _give_up(self, key: bytes) -> None:
        row = self._row_of.pop(key) if key in self._row_of else self._lasting.pop(key)
        self._saves.pop(row, None)
        self._free.append(row)
