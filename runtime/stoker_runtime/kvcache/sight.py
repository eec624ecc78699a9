"""How far layers with a window look back, in pages: which of a sequence's pages they still need, and how many at most.

A place is `page_size` tokens of a sequence. Layers that see everything keep one page a place, all places of it; those
with a window keep `parts` pages a place, and only places in sight: from the first that a query to come may read.
Kernels read keys in blocks that are aligned to READ_BLOCK tokens, so what is in sight begins at such a border: nothing
out of sight is ever read, not even to be masked.

Invariants: pure arithmetic. A sequence that is computed a page at a time never holds more than `span` places.
Knows nothing of sequences, pages' numbers or layers.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_BLOCK = 64
"""Keys that an attention kernel loads at once, at most (`block_n`, and the units of the kernels for SM 9.0)."""


@dataclass(frozen=True, slots=True)
class Sight:
    """`window`: keys that a query of these layers sees at most, itself included; `parts`: their pages a place.

    `block`: tokens that what is read is aligned to.
    """

    window: int
    parts: int
    page_size: int
    block: int = READ_BLOCK

    def first(self, position: int) -> int:
        """The first place that a query at `position`, or behind it, may read."""
        return max(position - self.window + 1, 0) // self.block * self.block // self.page_size

    @property
    def span(self) -> int:
        """The most places in sight of one query, its own included."""
        return -(-(self.window + max(self.block, self.page_size) - 1) // self.page_size)

    def most(self, places: int) -> int:
        """The most places that a sequence of so many holds at a time, computed a page at a time."""
        return min(places, self.span)

    def pages(self, tokens: int) -> int:
        """The most pages that a sequence of `tokens` holds at a time, of all layers, computed a page at a time."""
        places = -(-tokens // self.page_size)
        return places + self.parts * self.most(places)

    def tokens(self, pages: int) -> int:
        """The longest sequence that so many pages hold."""
        return max(self.most(pages // (1 + self.parts)), pages - self.parts * self.span) * self.page_size
