"""Tile sizes of the latent kernels, by heads, ranks, type and SM: rules, not measurements, for none has run on a GPU.

Invariants: a tile never changes which result is right, only its rounding and its speed; those chosen here fit the
shared memory of their SM for ranks up to 512.
Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_kernels.launch.chip import chip_of


@dataclass(frozen=True, slots=True)
class Tile:
    """`block_m` queries against `block_n` keys; `stages` is Triton's count, of which a page lookup takes about half."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int


def absorbed_tile(rows: int, rank: int, itemsize: int, sm: int) -> Tile:
    """For `rows` queries that share keys: heads of a token, or of a few.

    Each takes `rank` sums in registers, so that 64 of them want eight warps; 16 are the least that a dot takes. More
    heads than a tile holds read keys again, from L2.
    """
    large = chip_of(sm).large_shared
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or not large or itemsize > 2 or rank > 512 else 64
    if itemsize > 2 or rank > 512:
        return Tile(16, 16, 4, 1)
    # On SM 10.0 the sums rest beside the keys.
    deep = large and (sm < 100 or block_m < 64)
    return Tile(block_m, 32 if large else 16, 8 if block_m == 64 else 4, 5 if deep else 2)


def widened_tile(itemsize: int, sm: int, width: int) -> Tile:
    """For chunks, of heads whose keys without rotation, and values, take blocks of `width`: a power of two."""
    if itemsize > 2:
        return Tile(32, 16, 4, 1)
    if width > 128:
        return Tile(64, 32, 8, 2) if chip_of(sm).large_shared else Tile(32, 16, 4, 2)
    if chip_of(sm).large_shared:
        return Tile(128, 64, 8, 3)
    return Tile(64, 32, 4, 2)
