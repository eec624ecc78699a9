"""Which way `linear` goes on an H200 for a shape and a number of tokens: a tile of our own, or cuBLAS.

What was measured on this machine (`tuned`) comes first. Else rules name wide tiles (`busiest_tile`) and those that
spread a product (`spread_tile`), rows of a table those for up to 128 tokens. Rows come from
`python -m stoker_kernels.bench.layer`: the tile with which the whole chain of a decode layer is shortest, with
dependent launch and the trigger before the wait. M = 1, 16, 64 and 128 were timed (1, 32, 64 and 128 below 7B); a token
tile between two timed ones has its neighbour's row.
Invariants: a shape that stands in no row, and was not measured here, is treated as the one of its dtype whose N, and
K, are nearest by ratio; the answer for given (dtype, N, K, M) never changes within a process.
Does not know: what the shapes belong to, nor whether a kernel takes the operands (`small.refusal`).
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

from stoker_kernels.gemm import spread
from stoker_kernels.gemm.small import (
    MAX_TOKENS,
    PAIR_BYTES,
    RESIDENT,
    TOKEN_TILES,
    Family,
    Tile,
    token_tile,
)
from stoker_kernels.gemm.spread import SpreadTile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.tuned import CUBLAS, GemmWeight, text_for
from stoker_kernels.gemm.wide import CLUSTER, FEW_TOKENS, TOKENS, WideTile, pairing, tiles_for
from stoker_kernels.launch.chip import HOPPER_SHARED

_WIDE = re.compile(r"(\d+)([rt]?)(?:m(\d+))?")
_SPREAD = re.compile(r"(\d+)s(\d+)(?:m(\d+))?k(\d+)")
_TILE = re.compile(r"(\d+)x(\d+)(?:m(\d+))?k(\d+)([-=]?)")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured weight: our tile per token tile (8 to 128), as `parse` takes it, and the most tokens it serves."""

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
    # By `sweep`, behind a norm.
    (6144, 4096): Row(("64x2k2=", "64x1k2", "64x2k2", "64x2k2", "64x1k2"), 128),
    (4096, 4096): Row(("64x1k2", "64x2k3=", "64x1k2", "64x1m1k2", "64x1m1k2"), 128),
    (28672, 4096): Row(("64x1k1=", "64x2k1=", "64x2k2", "64x1k1=", "128x1k1"), 128),
    (4096, 14336): Row(("64x1k2", "128x2k3", "64x2k2", "64x1m1k2", "64x1m1k2"), 128),
    (7168, 5120): Row(("64x2k2=", "64x2k2=", "64x2k2", "64x2k2", "64x1k2"), 128),
    (5120, 5120): Row(("64x2k2=", "128x1k4=", "64x2k2", "64x2k2", "64x1k2"), 64),
    (27648, 5120): Row(("64x1k1=", "64x2k2", "64x2k2", "128x1k1", "128x1k1"), 128),
    (5120, 13824): Row(("128x1k3=", "128x1k4=", "128x1k4=", "128x1m1k5-", "128x1m2k4-"), 128),
    (6144, 2560): Row(("64x1k2", "64x2k1", "64x2k2", "64x2k2", "64x1k1"), 64),
    (2560, 4096): Row(("64x2k4=", "64x2k4=", "64x1k4=", "64x1m1k5-", "64x1m1k5-"), 128),
    (19456, 2560): Row(("64x1k2", "64x2k2", "64x1k2", "64x2k2", "128x1k2"), 64),
    (2560, 9728): Row(("64x2k3=", "64x2k4=", "64x1k4=", "128x1m1k5", "64x1m1k5-"), 128),
    (24576, 4096): Row(("128x1k2", "128x1k2", "64x2k2", "64x2k2", "128x1k2"), 128),
    # By `tune`: 7B on two GPUs.
    (2304, 3584): Row(("64x2k3", "64x2k4=", "64x1k4=", "64x1m1k5-", "64x1m1k3"), 128),
    (3584, 1792): Row(("64x2k3=", "64x2k3=", "128x1k4-", "64x1m1k4-", "64x1m4k2"), 128),
}
E4M3: dict[tuple[int, int], Row] = {
    (4608, 3584): Row(("128x2k3", "64x2k3=", "64x2k3=", "128x1k3", "64x1m1k3-"), 64),
    (3584, 3584): Row(("64x2k3=", "64x2k2-", "64x2k2-", "128x1k4", "64x1m1k4-"), 64),
    (37888, 3584): Row(("64x2k2-", "64x2k2=", "64x2k2=", "128x1k2", "128x1k2"), 64),
    (3584, 18944): Row(("128x2k4", "64x2k3=", "64x2k3=", "128x1m2k4", "64x1m4k2"), 128),
    # By `sweep`, behind a norm.
    (6144, 4096): Row(("128x2k2", "64x2k1", "64x1k1", "64x2k2", "64x1k2"), 64),
    (4096, 4096): Row(("128x2k3", "64x1k3=", "64x1k2=", "64x1m1k3-", "64x1m1k2"), 64),
    (28672, 4096): Row(("128x2k2", "128x1k1=", "64x1k2=", "128x1k2", "128x1k2"), 128),
    (4096, 14336): Row(("64x2k2", "64x2k2", "64x2k2", "64x1m1k2", "64x1m1k2"), 128),
    (7168, 5120): Row(("64x2k2", "64x1k2", "64x1k2", "64x2k1", "64x1k2"), 64),
    (5120, 5120): Row(("64x2k2=", "128x1k4=", "64x1k2=", "64x1m4k2-", "64x1k2"), 64),
    (27648, 5120): Row(("64x1k2", "128x1k1=", "64x1k2", "128x1k2", "128x1k1"), 128),
    (5120, 13824): Row(("128x1k3=", "128x1k4=", "128x1k4=", "128x1m1k4-", "64x1m4k2-"), 64),
    (6144, 2560): Row(("128x2k2", "64x2k2-", "64x1k2", "64x2k2", "64x1k2"), 64),
    (2560, 4096): Row(("64x2k4=", "64x2k4=", "64x1k3=", "64x1m1k5-", "64x1m1k4-"), 64),
    (19456, 2560): Row(("128x2k2", "64x2k2=", "64x1k2=", "128x1k2", "128x1k2"), 64),
    (2560, 9728): Row(("64x1k4=", "64x2k3=", "64x1k4=", "128x1m1k5", "64x1m1k5-"), 128),
    (24576, 4096): Row(("64x1k2=", "64x2k2=", "64x1k2=", "128x1k2", "128x1k2"), 64),
}


@dataclass(frozen=True, slots=True)
class GatedRow:
    """One weight of gate and up, with their activation in one kernel. None: `linear` and an activation are faster.

    `tiles`: our tile per token tile (8, 16, 32, 64), as `parse` takes it; `wide`: a wide tile as `parse_wide` takes it
    for more than GATED_SMALL tokens, up to a number of them; the last one goes on. Where the first of them is for
    GATED_SMALL, it goes before a tile of them, as does one that leaves next to no SM idle.
    """

    tiles: tuple[str | None, str | None, str | None, str | None]
    wide: tuple[tuple[int, str | None], ...]


# Rows and chunks of the kernels for few tokens that are compiled, and the most CTAs of a cluster.
SMALL_KERNELS, MOST_CTAS = ((64, 1), (64, 2), (128, 1), (128, 2)), 8

# By the layer's time of `python -m stoker_kernels.bench.fused` (H200).
GATED: dict[tuple[int, int], GatedRow] = {
    (37888, 3584): GatedRow(
        ("128x1k2", "64x1k2=", "64x2k2", "128x1k2"),
        ((128, "288r"), (192, "144rm192"), (256, "288t"), (384, "192tm192"), (512, "288r"), (8192, "256t")),
    ),
    (17920, 1536): GatedRow(
        ("64x1k2=", "128x1k1=", "128x1k1=", "64x2k2"), ((128, "256r"), (1024, "288t"), (8192, "256t"))
    ),
    (6144, 1024): GatedRow(("128x1k2=", "64x2k1=", "64x1k1=", "64x2k1"), ((256, None), (8192, "256t"))),
    (18944, 3584): GatedRow(
        ("64x2k2", "64x2k2", "64x2k2", "128x1k2"), ((64, "224rm64"), (128, "160r"), (192, "144rm192"), (8192, "288t"))
    ),
}
GATED_E4M3: dict[tuple[int, int], GatedRow] = {
    (37888, 3584): GatedRow((None, None, None, None), ((8192, "288"),)),
}
GATED_SMALL = FEW_TOKENS
# Wide tiles of weights that were not measured one by one go by the part of an H200's SMs that has work in a round, of
# which BUSY is enough. Where products bound the time (more than one block of tokens) 128 rows a tile take FEWER_ROWS
# more than their share of 288, and pairs by tokens are worth SHARED_WEIGHT. Fitted to 62 random and published weights
# of up to MOST_ROWS rows (`sweep`): 1% behind the best tile or cuBLAS in the mean. The second of each is of tiles of
# 192 tokens, fitted to eight weights of gate and up and 65 to 512 tokens: they serve one block of tokens or two, and
# 128 tokens with 272 rows one.
SM_PAIRS = 66
TWO_BLOCKS = 384
BUSY, FEWER_ROWS, SHARED_WEIGHT = 0.65, (0.12, 0.08), (1.02, 1.05)
# With 33 to 64 tokens, where bytes alone count, a wide tile is faster by up to 6% that has work for so many SMs.
BUSY_WITH_FEW = 0.93
MOST_ROWS = 65536
# How near a weight is to a measured one is a matter of its rows, which tiles cut, more than of K: with 48 random ones,
# up to 64 tokens, the nearest one's tile is 3% behind the best in bf16, and 6% where both count alike.
K_COUNTS = 0.15
# Up to so many tokens a product is spread over the SMs (`spread.py`) if a row of the weight has so many blocks of 128
# bytes: with all of K in one part, and in several (None: never). Four tiles read x together where a part has
# SHARED_BLOCKS. Fitted to 42 random weights; of 48 others up to 192 tokens bf16 is 1.5 to 2.7% behind the best.
SPREAD: dict[bool, tuple[tuple[int, int | None, int | None], ...]] = {
    False: ((128, 40, 64), (160, None, 64), (192, 40, 64), (208, None, None), (256, None, 80)),
    True: ((128, None, 64), (192, 40, 64), (208, None, None), (256, None, 80)),
}
SHARED_BLOCKS = 60
# A plain bf16 product of many tokens gets this tile where it leaves next to none without work and one of 256 rows, as
# cuBLAS's, clearly more: per round the two are as fast.
BF16_TILE = WideTile(224, gated=False, by_tokens=False)
BF16_LEAST, FULL, BUSIER = 1024, 0.95, 0.05


def gated_tile(fp8: bool, n: int, k: int, m: int) -> AnyTile | None:
    """The tile for silu(gate) · up of m tokens with an [n, k] weight of gate and up, None for two kernels."""
    measured = text_for(GemmWeight(n, k, fp8, True), m)
    return rule_gated(fp8, n, k, m) if measured is None else named(measured, fp8, True, m)


def rule_gated(fp8: bool, n: int, k: int, m: int) -> Tile | WideTile | None:
    """`gated_tile` of a weight that was not measured here."""
    row = nearest_gated(fp8, n, k)
    measured = (n, k) in (GATED_E4M3 if fp8 else GATED)
    if m > GATED_SMALL and not measured:
        return busiest_tile(True, fp8, n, m)
    if m > GATED_SMALL or (measured and GATED_SMALL == token_tile(m) == row.wide[0][0]):
        text = next((text for tokens, text in row.wide if m <= tokens), row.wide[-1][1])
        return None if text is None else parse_wide(text)
    if not fp8 and token_tile(m) == GATED_SMALL and (wide := wide_of_few(n)) is not None:
        return wide
    return _small_gated(row, m)


def streaming_gated_tile(n: int, k: int, m: int) -> Tile | None:
    """The tile for few tokens of a bf16 [n, k] weight of gate and up, which alone adds what adapters do; None for two
    kernels.
    """
    tile = gated_tile(False, n, k, m)
    if tile is None or isinstance(tile, Tile):
        return tile
    return _small_gated(nearest_gated(False, n, k), m) if m <= GATED_SMALL else None


@functools.cache
def _small_gated(row: GatedRow, m: int) -> Tile | None:
    text = row.tiles[TOKEN_TILES.index(token_tile(m))]
    return None if text is None else replace(parse(text, token_tile(m)), gated=True)


@functools.cache
def wide_of_few(n: int) -> WideTile | None:
    """The wide tile for 33 to GATED_SMALL tokens and n rows of gate and up in bf16; None where it leaves SMs idle."""
    best = max(tiles_for(True, False, GATED_SMALL), key=lambda tile: busy_share(tile, n, GATED_SMALL))
    return best if busy_share(best, n, GATED_SMALL) >= BUSY_WITH_FEW else None


@functools.cache
def busiest_tile(gated: bool, fp8: bool, n: int, m: int) -> WideTile | None:
    """The wide tile that loses least with n rows and m > GATED_SMALL tokens; None where all leave too many SMs idle."""
    best = busiest_of(gated, fp8, n, m, parts=0)
    return best if busy_share(best, n, m) >= BUSY else None


@functools.cache
def busiest_of(gated: bool, fp8: bool, n: int, m: int, parts: int) -> WideTile:
    """The wide tile of `parts` (as WideTile has them) that loses least with n rows and m tokens."""
    every = tiles_for(gated, fp8, m, parts)
    if m > TOKENS:
        every = [tile for tile in every if (m <= TWO_BLOCKS if tile.tokens > TOKENS else tile.halved)]
    return max(every, key=lambda tile: useful_share(tile, n, m) * _speed(tile, m))


def _speed(tile: WideTile, m: int) -> float:
    """How fast a tile's products are, against 288 rows by rows; up to one block of tokens bytes count, not products."""
    if m <= TOKENS:
        return 1.0
    kind = tile.tokens > TOKENS
    return (SHARED_WEIGHT[kind] if tile.by_tokens else 1.0) / (1 + FEWER_ROWS[kind] * (288 - tile.rows) / 160)


def bf16_wide_tile(n: int, m: int) -> WideTile | None:
    """The plain wide tile for m tokens and n rows of bf16, None for cuBLAS."""
    least = max(FULL, busy_share(WideTile(256, gated=False), n, m) + BUSIER)
    return BF16_TILE if m >= BF16_LEAST and busy_share(BF16_TILE, n, m) >= least else None


def busy_share(tile: WideTile, n: int, m: int) -> float:
    """The part of the SMs' rounds that works on rows of the weight, and on blocks of tokens, that are there."""
    return useful_share(tile, n, -(-m // tile.tokens) * tile.tokens)


def useful_share(tile: WideTile, n: int, m: int) -> float:
    """The part of the SMs' rounds that works on rows of the weight, and on tokens, that are there."""
    rounds = -(-pairing(tile, n, m, SM_PAIRS).tiles // SM_PAIRS)
    return n * m / (rounds * SM_PAIRS * CLUSTER * tile.rows * tile.tokens)


@functools.cache
def parse_wide(text: str) -> WideTile:
    """The gated wide tile that a number of rows names; "r" behind it: pairs of CTAs by rows, "t": by tokens; "m192"
    behind that: of so many tokens. Raises ValueError.
    """
    found = _WIDE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no wide tile")
    rows, way, tokens = found.groups()
    return WideTile(int(rows), True, {"r": False, "t": True}.get(way), tokens=int(tokens or TOKENS))


@functools.cache
def parse_spread(text: str) -> SpreadTile:
    """"136s128m2k3": 136 rows × 128 tokens, x shared by 2 tiles, K cut into 3 parts. Raises ValueError."""
    found = _SPREAD.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no tile")
    rows, tokens, share, parts = found.groups()
    return SpreadTile(int(rows), int(tokens), int(parts), int(share or 1))


@functools.cache
def own_tile(fp8: bool, n: int, k: int, m: int) -> Tile:
    """Our best tile for a product of m ≤ 128 tokens with an [n, k] weight."""
    tokens = token_tile(m)
    return parse(_nearest(fp8, n, k).tiles[TOKEN_TILES.index(tokens)], tokens)


@functools.cache
def best_tile(fp8: bool, n: int, k: int, m: int) -> AnyTile | None:
    """Our best tile where it beats cuBLAS, else None."""
    measured = text_for(GemmWeight(n, k, fp8, False), m)
    return rule_tile(fp8, n, k, m) if measured is None else named(measured, fp8, False, m)


def rule_tile(fp8: bool, n: int, k: int, m: int) -> AnyTile | None:
    """`best_tile` of a weight that was not measured here."""
    spreading = spread_tile(fp8, n, k, m)
    if m > MAX_TOKENS:
        return spreading or (busiest_tile(False, fp8, n, m) if fp8 else bf16_wide_tile(n, m))
    wide = busiest_tile(False, fp8, n, m) if m > GATED_SMALL and n <= MOST_ROWS else None
    if wide and (spreading is None or busy_share(wide, n, m) >= spreading.busy_share(n)):
        return wide
    if spreading is not None:
        return spreading
    tile = own_tile(fp8, n, k, m) if m <= min(MAX_TOKENS, _nearest(fp8, n, k).up_to) else None
    return tile if tile is None or m <= GATED_SMALL or (n, k) in (E4M3 if fp8 else BF16) or _at_once(tile, n) else None


@functools.cache
def spread_tile(fp8: bool, n: int, k: int, m: int) -> SpreadTile | None:
    """The tile that spreads m tokens' product over the SMs, None where other ways are faster."""
    row_bytes = k if fp8 else 2 * k
    k_blocks = row_bytes // 128
    every = list(spread.spread_tiles(n, row_bytes, m))
    alone, shared = (
        min((tile for tile in every if tile.share == share), key=lambda tile: tile.parts, default=None)
        for share in (1, 4)
    )
    tile = shared if shared and (alone is None or k_blocks // shared.parts >= SHARED_BLOCKS) else alone
    least = next((row[1:] for row in SPREAD[fp8] if m <= row[0]), None)
    needed = least[tile.parts > 1] if tile and least else None
    return tile if needed is not None and k_blocks >= needed else None


def _at_once(tile: Tile, n: int) -> bool:
    """Whether all clusters of a multicast tile run at once with n rows: a second round doubles the time."""
    room = 1 if tile.shared_bytes > PAIR_BYTES else 2
    clusters = -(-n // (tile.rows * tile.share))
    return tile.family == "multicast" and clusters <= room * RESIDENT[tile.cluster - 1]


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
    budget = PAIR_BYTES if ring else HOPPER_SHARED
    for stages in range(16, 1, -1):
        ctas = 2 if ring == "=" else 1
        tile = Tile(family, int(rows), int(chunks), tokens, stages, ctas, cluster, share=int(share or 1))
        if tile.shared_bytes <= budget:
            return tile
    raise ValueError(f"{text!r} for {tokens} tokens has no room for two stages")


def named(text: str, fp8: bool, gated: bool, m: int) -> AnyTile | None:
    """The tile for m tokens that `text_of` made this text of, None for CUBLAS. Raises ValueError for another text."""
    if text == CUBLAS:
        return None
    if "s" in text:
        tile = parse_spread(text)
        if gated or not tile.compiled or spread.token_tile(m) != tile.tokens:
            raise ValueError(f"{text!r} is no tile for {m} tokens")
        return tile
    if "x" not in text:
        wide = replace(parse_wide(text), gated=gated)
        if replace(wide, by_tokens=False) not in tiles_for(gated, fp8, m) or text_of(wide) != text:
            raise ValueError(f"{text!r} is no wide tile for {m} tokens")
        return wide
    found = _TILE.fullmatch(text)
    if found is None or m > (GATED_SMALL if gated else MAX_TOKENS) or (gated and fp8):
        raise ValueError(f"{text!r} is no tile for {m} tokens")
    rows, chunks, share, split, _ = found.groups()
    compiled = (int(rows), int(chunks)) in SMALL_KERNELS and 1 <= int(share or 1) * int(split) <= MOST_CTAS
    if not compiled or (share is not None and (int(chunks) > 1 or m <= 32 or gated or int(share) * int(split) < 2)):
        raise ValueError(f"{text!r} names a kernel that there is not")
    small = parse(text, token_tile(m))
    return replace(small, gated=True) if gated else small


def text_of(tile: AnyTile) -> str:
    """The text that `parse`, `parse_wide` or `parse_spread` makes this tile of."""
    if isinstance(tile, SpreadTile):
        share = f"m{tile.share}" if tile.share > 1 else ""
        return f"{tile.rows}s{tile.tokens}{share}k{tile.parts}"
    if isinstance(tile, WideTile):
        ways = {None: "", False: "r", True: "t"}
        return f"{tile.rows}{ways[tile.by_tokens]}" + (f"m{tile.tokens}" if tile.tokens != TOKENS else "")
    ring = "=" if tile.ctas_per_sm == 2 else "-" if tile.shared_bytes <= PAIR_BYTES else ""
    share = f"m{tile.share}" if tile.family == "multicast" else ""
    return f"{tile.rows}x{tile.chunks}{share}k{tile.split}{ring}"


@functools.cache
def nearest_gated(fp8: bool, n: int, k: int) -> GatedRow:
    """The row of the weight nearest to [n, k]."""
    table = GATED_E4M3 if fp8 else GATED
    return table[min(table, key=lambda shape: _distance(shape, n, k))]


def _nearest(fp8: bool, n: int, k: int) -> Row:
    table = E4M3 if fp8 else BF16
    return table[min(table, key=lambda shape: _distance(shape, n, k, K_COUNTS))]


def _distance(shape: tuple[int, int], n: int, k: int, k_counts: float = 1.0) -> float:
    return abs(math.log(shape[0] / n)) + k_counts * abs(math.log(shape[1] / k))
