"""The stream-K partition of a small GEMM: which CTA multiplies which k blocks of which tile.

tiles × k_blocks units stand in one line, tile by tile, and are cut into equal contiguous ranges, one per CTA. A tile
that falls to several CTAs is *shared*: each leaves its fp32 sum in one of its two slots, the last to finish adds them
up in CTA order.
Invariants: the cut depends on (tiles, k_blocks, ctas) alone, so sums do not change with the number of tokens; every
unit belongs to one CTA; CTAs differ by at most one unit. csrc/stream_k.cuh is the same arithmetic.
Does not know: what a unit holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """One CTA's share of one tile: k blocks [begin, end)."""

    tile: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StreamK:
    """A cut of tiles × k_blocks units over `ctas` CTAs.

    Raises ValueError for more CTAs than units: an idle CTA would be counted among those that share a tile.
    """

    tiles: int
    k_blocks: int
    ctas: int

    def __post_init__(self) -> None:
        if not 0 < self.ctas <= self.units:
            raise ValueError(f"{self.units} units cannot be cut over {self.ctas} CTAs")

    @property
    def units(self) -> int:
        """All units."""
        return self.tiles * self.k_blocks

    def begin_of(self, cta: int) -> int:
        """First unit of a CTA."""
        return cta * self.units // self.ctas

    def cta_of(self, unit: int) -> int:
        """The CTA that a unit belongs to."""
        return ((unit + 1) * self.ctas - 1) // self.units

    def segments(self, cta: int) -> list[Segment]:
        """A CTA's segments in the order it runs them: the tiles it shares first, so that their sums hide."""
        first, last = self.begin_of(cta), self.begin_of(cta + 1)
        if first == last:
            return []
        tiles = list(range(first // self.k_blocks, (last - 1) // self.k_blocks + 1))
        ordered = [tiles[0], *tiles[-1:], *tiles[1:-1]] if len(tiles) > 1 else tiles
        return [
            Segment(tile, max(first, start) - start, min(last, start + self.k_blocks) - start)
            for tile, start in ((tile, tile * self.k_blocks) for tile in ordered)
        ]

    def contributors(self, tile: int) -> range:
        """The CTAs that share a tile, in the order their sums are added."""
        return range(self.cta_of(tile * self.k_blocks), self.cta_of((tile + 1) * self.k_blocks - 1) + 1)

    def slot_of(self, cta: int, tile: int) -> int:
        """Where a CTA leaves its sum for a shared tile: slot 0 if its range begins there, else slot 1."""
        return 2 * cta + (1 if self.begin_of(cta) < tile * self.k_blocks else 0)
