"""How many first pages the rows of a step have in common: what the host's tables say is what the sequences hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from stoker_runtime.executor.prefix.pages import BLOCK, CommonPages


class Sequences:
    """Sequences in slots that share pages as a prefix cache has them do: the newest page of each is its own."""

    def __init__(self, slots: int, longest: int, rng: random.Random) -> None:
        self.tables = CommonPages(slots, longest)
        self.pages: dict[int, list[int]] = {}
        self._slots, self._longest, self._rng = slots, longest, rng
        self._fresh = itertools.count(1)
        self._trunks = [[next(self._fresh) for _ in range(longest)] for _ in range(2)]
        # One branches off the other.
        at = rng.randrange(longest)
        self._trunks[1][:at] = self._trunks[0][:at]

    def begin(self, slot: int) -> None:
        shared = self._rng.choice(self._trunks)[: self._rng.choice([0, 1, 5, self._rng.randrange(self._longest - 3)])]
        self.pages[slot] = [*shared, next(self._fresh)]
        self.tables.update(slot, 0, self.pages[slot])

    def grow(self, slot: int) -> None:
        pages = self.pages[slot]
        if len(pages) < self._longest:
            pages.append(next(self._fresh))
            self.tables.update(slot, len(pages) - 1, pages[-1:])

    def replace_newest(self, slot: int) -> None:
        """A copy on write."""
        pages = self.pages[slot]
        pages[-1] = next(self._fresh)
        self.tables.update(slot, len(pages) - 1, pages[-1:])

    def end(self, slot: int) -> None:
        """Others may get its last pages, and its line still names them."""
        del self.pages[slot]


def in_common(lists: Sequence[list[int]]) -> int:
    return next(
        (at for at, each in enumerate(zip(*lists, strict=False)) if len(set(each)) > 1), min(map(len, lists))
    )


@pytest.mark.parametrize("longest", [9, BLOCK, 3 * BLOCK + 17])
def test_any_history_gives_the_pages_in_common(longest: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    found = set()
    for _ in range(12):
        slots = rng.randrange(2, 9)
        held = Sequences(slots, longest, rng)
        for _ in range(60):
            slot = rng.randrange(slots)
            if slot not in held.pages:
                held.begin(slot)
            else:
                rng.choice([held.grow, held.grow, held.grow, held.replace_newest, held.end])(slot)
            if len(held.pages) > 1:
                rows = tuple(rng.sample(sorted(held.pages), rng.randrange(2, len(held.pages) + 1)))
                want = in_common([held.pages[row] for row in rows])
                assert held.tables.common(rows) == want, (rows, held.pages)
                assert held.tables.common(rows) == want
                found.add(want)
    assert len(found) > 2, "the histories were meant to share different numbers of pages"


def test_what_a_slot_held_before_does_not_count() -> None:
    """The line of a short sequence goes on with the pages of the long one before it, which a neighbour holds now."""
    tables = CommonPages(2, 8)
    tables.update(0, 0, [1, 2, 3, 4, 50])
    tables.update(1, 0, [1, 2, 3, 4, 60])
    assert tables.common((0, 1)) == 4
    tables.update(0, 0, [1, 2, 70])
    assert tables.common((1, 0)) == 2


def test_a_row_that_leaves_lets_the_others_share_more() -> None:
    tables = CommonPages(3, 6)
    for slot, pages in enumerate(([1, 9], [1, 2, 3, 8], [1, 2, 3, 7])):
        tables.update(slot, 0, pages)
    assert tables.common((0, 1, 2)) == 1
    assert tables.common((1, 2)) == 3
    tables.update(0, 0, [1, 2, 3, 4])
    assert tables.common((0, 1, 2)) == 3
