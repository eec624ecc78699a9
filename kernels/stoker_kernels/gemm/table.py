"""Which way `linear` goes on an H200 for a shape and a number of tokens: a tile of our own, or cuBLAS.

Rows come from `python -m stoker_kernels.bench.layer`: the tile with which the whole chain of a decode layer is
shortest, with dependent launch and the trigger before the wait. M = 1, 16, 64 and 128 were timed (1, 32, 64 and 128
below 7B); a token tile between two timed ones has its neighbour's row.
Invariants: a shape that was not measured is treated as the measured one of its dtype whose N and K are nearest by
ratio; the answer for given (dtype, N, K, M) never changes within a process.
Does not know: what the shapes belong to, nor whether a kernel takes the operands (`small.refusal`).
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

from stoker_kernels.gemm.small import (
    MAX_TOKENS,
    PAIR_BYTES,
    SHARED_LIMIT,
    TOKEN_TILES,
    Family,
    Tile,
    token_tile,
)
from stoker_kernels.gemm.wide import CLUSTER, TOKENS, WideTile, pairing

_TILE = re.compile(r"(\d+)x(\d+)(?:m(\d+))?k(\d+)([-=]?)")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured weight: our tile per token tile (8, 16, 32, 64, 128), and the most tokens that it is used for.

    Tiles read as `parse` takes them.
    """

    tiles: tuple[str, str, str, str, str]
    up_to: int


BF16: dict[tuple[int, int], Row] = {
    (4608, 3584): Row(("128x2k3", "64x1k3=", "64x1k3=", "128x1m1k3", "64x1m1k3-"), 64),
    (3584, 3584): Row(("64x1k4=", "64x1k4=", "64x1k4=", "128x1m1k4", "64x1m4k2"), 128),
    (37888, 3584): Row(("64x1k2=", "64x1k2", "64x1k2", "128x1k2", "128x1k2"), 64),
    (3584, 18944): Row(("64x2k4=", "64x1k4=", "64x1k4=", "128x1m1k4", "64x1m4k2"), 128),
    (152064, 3584): Row(("128x1k2=", "128x1k1", "128x1k1", "128x2k1", "128x1k1"), 64),
    (2048, 1536): Row(("64x2k3=", "64x2k3=", "64x2k3=", "64x1m1k4-", "64x1m1k3"), 128),
    (1536, 1536): Row(("64x2k4=", "64x2k4=", "64x1k4=", "64x1m1k4-", "64x1m1k4"), 128),
    (17920, 1536): Row(("64x2k2=", "64x2k2=", "128x2k2", "64x1k2", "64x1m1k2-"), 64),
    (1536, 8960): Row(("64x2k8=", "64x2k8=", "64x2k4-", "64x1m1k4", "64x1m2k4"), 64),
    (151936, 1536): Row(("128x1k2=", "64x1k1=", "64x1k1=", "128x2k1", "128x1k1"), 64),
    (4096, 1024): Row(("64x2k2=", "64x2k2=", "64x2k2-", "64x1m1k2-", "64x1m1k2-"), 64),
    (1024, 2048): Row(("64x2k8=", "64x2k8=", "64x2k8-", "64x1m1k6-", "64x1m1k6"), 128),
    (6144, 1024): Row(("64x2k1=", "64x2k1=", "64x2k1=", "64x2k1", "64x1k1"), 64),
    (1024, 3072): Row(("64x2k8=", "64x2k8=", "64x2k8-", "64x1m1k6", "64x1m1k6"), 128),
    (151936, 1024): Row(("128x1k2", "64x1k1=", "64x1k1=", "128x2k1", "128x1k1"), 64),
}
E4M3: dict[tuple[int, int], Row] = {
    (4608, 3584): Row(("128x2k3", "64x2k3=", "64x2k3=", "128x1k3", "64x1m1k3-"), 64),
    (3584, 3584): Row(("64x2k3=", "64x2k2-", "64x2k2-", "128x1k4", "64x1m1k4-"), 64),
    (37888, 3584): Row(("64x2k2-", "64x2k2=", "64x2k2=", "128x1k2", "128x1k2"), 64),
    (3584, 18944): Row(("128x2k4", "64x2k3=", "64x2k3=", "128x1m2k4", "64x1m4k2"), 128),
}


@dataclass(frozen=True, slots=True)
class GatedRow:
    """One weight of gate and up, with their activation in one kernel. None: `linear` and an activation are faster.

    `tiles`: our tile per token tile (8, 16, 32, 64), as `parse` takes it; `wide`: a wide tile as `parse_wide` takes it
    for more than GATED_SMALL tokens, up to a number of them; the last one goes on.
    """

    tiles: tuple[str | None, str | None, str | None, str | None]
    wide: tuple[tuple[int, str | None], ...]


# By the layer's time of `python -m stoker_kernels.bench.fused` (H200).
GATED: dict[tuple[int, int], GatedRow] = {
    (37888, 3584): GatedRow(
        ("128x1k2", "64x1k2=", "64x2k2", "128x1k2"),
        ((128, "288r"), (256, "288t"), (512, "288r"), (8192, "256t")),
    ),
    (17920, 1536): GatedRow(
        ("64x1k2=", "128x1k1=", "128x1k1=", "64x2k2"), ((128, "256r"), (1024, "288t"), (8192, "256t"))
    ),
    (6144, 1024): GatedRow(("128x1k2=", "64x2k1=", "64x1k1=", "64x2k1"), ((256, None), (8192, "256t"))),
}
GATED_E4M3: dict[tuple[int, int], GatedRow] = {
    (37888, 3584): GatedRow((None, None, None, None), ((8192, "288"),)),
}
GATED_SMALL = 64
WIDE_ROWS = (224, 256, 288)  # of plain e4m3 tiles; of equals the smallest is fastest
# Wide tiles go where they leave little of an H200's SMs without work in any round: plain ones, and gated ones of a
# weight that was not measured.
SM_PAIRS = 66
BUSY = 0.9
# A plain bf16 product of many tokens gets this tile where it leaves next to none without work and one of 256 rows, as
# cuBLAS's, clearly more: per round the two are as fast.
BF16_TILE = WideTile(224, gated=False, by_tokens=False)
BF16_LEAST, FULL, BUSIER = 1024, 0.95, 0.05


def gated_tile(fp8: bool, n: int, k: int, m: int) -> Tile | WideTile | None:
    """The tile for silu(gate) · up of m tokens with an [n, k] weight of gate and up, None for two kernels."""
    row = nearest_gated(fp8, n, k)
    if m > GATED_SMALL:
        text = next((text for tokens, text in row.wide if m <= tokens), row.wide[-1][1])
        if text is None:
            return None
        named = parse_wide(text)
        if (n, k) in (GATED_E4M3 if fp8 else GATED):
            return named
        both = (named, replace(named, rows=256 if named.rows == 288 else 288))
        return next((tile for tile in both if busy_share(tile, n, m) >= BUSY), None)
    text = row.tiles[TOKEN_TILES.index(token_tile(m))]
    return None if text is None else _parse_gated(text, token_tile(m))


def fp8_wide_tile(n: int, m: int) -> WideTile | None:
    """The plain e4m3 tile that keeps the SMs busiest with m tokens and n rows; None where each leaves many idle."""
    busiest = max((WideTile(rows, gated=False) for rows in WIDE_ROWS), key=lambda tile: busy_share(tile, n, m))
    return busiest if busy_share(busiest, n, m) >= BUSY else None


def bf16_wide_tile(n: int, m: int) -> WideTile | None:
    """The plain wide tile for m tokens and n rows of bf16, None for cuBLAS."""
    least = max(FULL, busy_share(WideTile(256, gated=False), n, m) + BUSIER)
    return BF16_TILE if m >= BF16_LEAST and busy_share(BF16_TILE, n, m) >= least else None


def busy_share(tile: WideTile, n: int, m: int) -> float:
    """The part of the SMs' rounds that works on rows of the weight, and on blocks of tokens, that are there."""
    rounds = -(-pairing(tile, n, m, SM_PAIRS).tiles // SM_PAIRS)
    return n * -(-m // TOKENS) / (rounds * SM_PAIRS * CLUSTER * tile.rows)


@functools.cache
def parse_wide(text: str) -> WideTile:
    """The gated wide tile that "256" or "288" names; "r" behind it: pairs of CTAs by rows, "t": by tokens."""
    return WideTile(int(text.rstrip("rt")), True, {"r": False, "t": True}.get(text[-1]))


@functools.cache
def own_tile(fp8: bool, n: int, k: int, m: int) -> Tile:
    """Our best tile for a product of m ≤ 128 tokens with an [n, k] weight."""
    tokens = token_tile(m)
    return parse(_nearest(fp8, n, k).tiles[TOKEN_TILES.index(tokens)], tokens)


@functools.cache
def best_tile(fp8: bool, n: int, k: int, m: int) -> Tile | WideTile | None:
    """Our best tile where it beats cuBLAS, else None."""
    if m > MAX_TOKENS:
        return fp8_wide_tile(n, m) if fp8 else bf16_wide_tile(n, m)
    return own_tile(fp8, n, k, m) if m <= min(MAX_TOKENS, _nearest(fp8, n, k).up_to) else None


def parse(text: str, tokens: int) -> Tile:
    """The tile that `text` names, with as many stages as fit.

    "64x2k4" is 64 rows × 2 chunks by clusters of 4 with all of an SM's shared memory; "128x1m2k4" 128 rows × 1 chunk, x
    shared by 2 tiles of a cluster, K split over 4 (family `multicast`).
    A "-" behind it takes half of the shared memory, "=" half and up to two CTAs an SM. Raises ValueError.
    """
    found = _TILE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a tile")
    rows, chunks, share, split, ring = found.groups()
    family: Family = "multicast" if share else "cluster"
    cluster = int(share or 1) * int(split)
    budget = PAIR_BYTES if ring else SHARED_LIMIT
    for stages in range(16, 1, -1):
        ctas = 2 if ring == "=" else 1
        tile = Tile(family, int(rows), int(chunks), tokens, stages, ctas, cluster, share=int(share or 1))
        if tile.shared_bytes <= budget:
            return tile
    raise ValueError(f"{text!r} for {tokens} tokens has no room for two stages")


def text_of(tile: Tile | WideTile) -> str:
    """The text that `parse`, or `parse_wide`, makes this tile of."""
    if isinstance(tile, WideTile):
        ways = {None: "", False: "r", True: "t"}
        return f"{tile.rows}{ways[tile.by_tokens]}"
    ring = "=" if tile.ctas_per_sm == 2 else "-" if tile.shared_bytes <= PAIR_BYTES else ""
    share = f"m{tile.share}" if tile.family == "multicast" else ""
    return f"{tile.rows}x{tile.chunks}{share}k{tile.split}{ring}"


@functools.cache
def _parse_gated(text: str, tokens: int) -> Tile:
    return replace(parse(text, tokens), gated=True)


@functools.cache
def nearest_gated(fp8: bool, n: int, k: int) -> GatedRow:
    """The row of the weight nearest to [n, k]."""
    table = GATED_E4M3 if fp8 else GATED
    return table[min(table, key=lambda shape: _distance(shape, n, k))]


def _nearest(fp8: bool, n: int, k: int) -> Row:
    table = E4M3 if fp8 else BF16
    return table[min(table, key=lambda shape: _distance(shape, n, k))]


def _distance(shape: tuple[int, int], n: int, k: int) -> float:
    return abs(math.log(shape[0] / n)) + abs(math.log(shape[1] / k))
