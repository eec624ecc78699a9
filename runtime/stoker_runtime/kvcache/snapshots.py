"""Which prefixes have their states kept beside their pages: copies of a sequence's states where a page ended.

A state stands for all tokens before it, so pages of a prefix are of use only together with a snapshot at their end. A
snapshot has a row of the device's states, behind those of the slots.

Invariants: a row is free or has one key, a key one row. Snapshots are given up with the page that their key names, and
when rows are short the least recently used one: spare ones first, those of sessions after all others. A step copies
`saves` before all else; which prefixes a step begins from is decided after the saves of it are, so none of these is
overwritten by them.
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
        self._spare: OrderedDict[bytes, int] = OrderedDict()
        """Those that nobody may come back to; as in all of these, the least recently used first."""
        self._usual: OrderedDict[bytes, int] = OrderedDict()
        self._lasting: OrderedDict[bytes, int] = OrderedDict()
        """Those of sessions; at most half of all."""
        self._kinds = (self._spare, self._usual, self._lasting)
        """In the order in which they are given up."""
        self._saves: dict[int, int] = {}
        """Of the step to come: the slot whose states go to a row."""

    @property
    def used(self) -> int:
        """Snapshots that there are."""
        return len(self._rows) - len(self._free)

    def has(self, key: bytes) -> bool:
        """Whether there is a snapshot of this prefix."""
        return any(key in kind for kind in self._kinds)

    def longest(self, keys: list[bytes], limit: int) -> int:
        """How many of the first `limit` pages with these keys a sequence need not compute."""
        while limit and not self.has(keys[limit - 1]):
            limit -= 1
        return limit

    def use(self, key: bytes) -> int:
        """The row of a snapshot, which is the most recently used one now, and spare no more."""
        if key in self._spare:
            self._usual[key] = self._spare.pop(key)
        found = self._lasting if key in self._lasting else self._usual
        found.move_to_end(key)
        return found[key]

    def save(self, key: bytes, slot: int, *, spare: bool = False) -> None:
        """Have the next step begin by keeping the states of `slot` under `key`, unless they are there.

        A `spare` snapshot takes the place of spare ones alone, and is not made where there is none.
        """
        if self.has(key):
            if not spare:
                self.use(key)
            return
        if not self._free:
            if spare and not self._spare:
                return
            self._give_up(next(next(iter(kind)) for kind in self._kinds if kind))
        row = self._free.pop()
        (self._spare if spare else self._usual)[key] = row
        self._saves[row] = slot

    def keep(self, keys: Iterable[bytes]) -> None:
        """What is there of these keys belongs to a session: it outlives those that do not."""
        for key in keys:
            found = next((kind for kind in (self._spare, self._usual) if key in kind), None)
            if found is not None:
                self._lasting[key] = found.pop(key)
                if len(self._lasting) > len(self._rows) // 2:
                    oldest, row = self._lasting.popitem(last=False)
                    self._usual[oldest] = row

    def spare(self, key: bytes) -> None:
        """Of little use from now on, unless somebody uses it."""
        if key in self._usual:
            self._spare[key] = self._usual.pop(key)

    def page_given_up(self, key: bytes) -> int | None:
        """The page at whose end a snapshot would be is gone: the row that it had, if there was one and it was written.
        """
        return self._give_up(key) if self.has(key) else None

    def take_saves(self) -> Moves:
        """(slot, row) of the step that is launched next."""
        if not self._saves:
            return ()
        saves = tuple((slot, row) for row, slot in self._saves.items())
        self._saves = {}
        return saves

    def clear(self) -> None:
        """Forget all, for when nothing on the device can be trusted."""
        for key in [key for kind in self._kinds for key in kind]:
            self._give_up(key)

    def check(self, is_cached: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless each row is free or of one key, whose page is there."""
        held = [row for kind in self._kinds for row in kind.values()]
        keys = [key for kind in self._kinds for key in kind]
        assert sorted(held + self._free) == list(self._rows), "rows of snapshots are lost or shared"
        assert len(set(keys)) == len(keys), "a snapshot rests twice"
        assert set(self._saves) <= set(held), "states are saved for nobody"
        assert all(map(is_cached, keys)), "a snapshot outlived its page"

    def _give_up(self, key: bytes) -> int | None:
        row = next(kind for kind in self._kinds if key in kind).pop(key)
        self._free.append(row)
        return row if self._saves.pop(row, None) is None else None
