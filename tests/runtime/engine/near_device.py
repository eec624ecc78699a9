"""What a device has of layers with a window that give up pages: tables of their own, over the pages of all.

An entry is the fingerprint of the whole prefix, with the number of its table: what is read has to be the sequence's
own, or one with the same prefix, as far back as the window reaches.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker_runtime.kvcache.sight import Sight


class NearDevice:
    """The tables of all slots; `kv` are the entries of all pages, by page."""

    def __init__(self, sight: Sight, kv: list[list[int | None]]) -> None:
        self.sight = sight
        self._kv = kv
        self._tables: dict[int, dict[tuple[int, int], int]] = {}
        self.given_up = 0
        """Reads of places from which on a sequence's first ones are out of sight."""

    def assign(self, slot: int) -> None:
        self._tables[slot] = {}

    def map(self, slot: int, table: int, index: int, page: int) -> None:
        assert 1 <= table <= self.sight.parts, f"there is no table {table}"
        self._tables[slot][table, index] = page

    def verify_writers(self, rows: list[tuple[int, int, int]], written: dict[int, int]) -> None:
        """No page has two writers, of whatever table, and none that is read is written by another slot."""
        size, own = self.sight.page_size, dict(written)
        for slot, start, stop in rows:
            for table in self._numbers:
                for index in range(start // size, (stop - 1) // size + 1):
                    page = self._page(slot, table, index)
                    assert page not in own, f"page {page} has two writers"
                    own[page] = slot
        for slot, start, stop in rows:
            for table in self._numbers:
                for index in range(self.sight.first(start), (stop - 1) // size + 1):
                    page = self._page(slot, table, index)
                    assert own.get(page, slot) == slot, f"page {page} is read by {slot} and written by another"
                    assert page not in written, f"page {page} is one of other layers"

    def read(self, slot: int, start: int, truth: Callable[[int], int | None]) -> None:
        """What a query at `start` sees is what layers that see everything have there."""
        first = max(start - self.sight.window + 1, 0)
        self.given_up += self.sight.first(start) > 0
        for table in self._numbers:
            for position in range(first, start):
                at = self._kv[self._page(slot, table, position // self.sight.page_size)]
                mine, expected = at[position % self.sight.page_size], hash((truth(position), table))
                assert mine == expected, f"position {position} of table {table} reads foreign KV"

    def write(self, slot: int, position: int, fingerprint: int) -> None:
        for table in self._numbers:
            page = self._page(slot, table, position // self.sight.page_size)
            self._kv[page][position % self.sight.page_size] = hash((fingerprint, table))

    @property
    def _numbers(self) -> range:
        return range(1, self.sight.parts + 1)

    def _page(self, slot: int, table: int, index: int) -> int:
        page = self._tables[slot].get((table, index))
        assert page is not None, f"slot {slot} has no page {index} in table {table}"
        return page
