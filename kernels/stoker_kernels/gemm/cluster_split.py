"""The partition of a small GEMM over clusters: which CTA multiplies which k blocks of which tile.

Tiles are dealt to clusters in contiguous runs that differ by at most one tile. The CTAs of a cluster take whole tiles
in turn and share what is left over by cutting its K into equal parts; their sums meet in distributed shared memory.
Invariants: the cut depends on (tiles, k_blocks, clusters, size) alone, so sums do not change with the number of
tokens; every k block of every tile belongs to one CTA. csrc/cluster_split.cuh is the same arithmetic.
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
class ClusterSplit:
    """A cut of tiles × k_blocks units over `clusters` clusters of `size` CTAs.

    Raises ValueError for a cluster without a tile, a CTA without a k block of a shared tile, or a cluster with more
    than one shared tile: its CTAs have one buffer for each other's sums.
    """

    tiles: int
    k_blocks: int
    clusters: int
    size: int

    def __post_init__(self) -> None:
        if not 0 < self.clusters <= self.tiles or self.k_blocks < self.size:
            raise ValueError(f"{self.tiles} tiles of {self.k_blocks} k blocks cannot be cut over {self.clusters} "
                             f"clusters of {self.size}")
        fewest = self.tiles // self.clusters
        if max(count % self.size for count in {fewest, -(-self.tiles // self.clusters)}) > 1:
            raise ValueError(f"{self.tiles} tiles leave {self.clusters} clusters of {self.size} with two shared tiles")

    @property
    def ctas(self) -> int:
        """All CTAs."""
        return self.clusters * self.size

    def segments(self, cta: int) -> list[Segment]:
        """A CTA's segments in the order it runs them: the shared tile first, so that its sum hides."""
        cluster, rank = divmod(cta, self.size)
        begin, end = cluster * self.tiles // self.clusters, (cluster + 1) * self.tiles // self.clusters
        whole, shared = divmod(end - begin, self.size)
        first = rank * self.k_blocks // self.size, (rank + 1) * self.k_blocks // self.size
        return [Segment(begin + whole * self.size, *first)] * shared + [
            Segment(begin + i * self.size + rank, 0, self.k_blocks) for i in range(whole)
        ]


@dataclass(frozen=True, slots=True)
class MulticastSplit:
    """A cut where a CTA has a part of one tile: clusters of `share` neighbouring tiles × `split` equal parts of K.

    Raises ValueError for a part without a k block, and for a cluster of one CTA, which the kernel cannot run in.
    csrc/sm90_gemm_multicast.cuh has the same arithmetic.
    """

    tiles: int
    k_blocks: int
    share: int
    split: int

    def __post_init__(self) -> None:
        if self.k_blocks < self.split or self.share * self.split < 2:
            raise ValueError(f"{self.k_blocks} k blocks cannot be cut into {self.split} parts for clusters of "
                             f"{self.share * self.split} CTAs")

    @property
    def ctas(self) -> int:
        """All CTAs, those without a tile too, in clusters of `share` · `split`."""
        return -(-self.tiles // self.share) * self.share * self.split
