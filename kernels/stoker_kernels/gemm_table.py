"""Which way `linear` goes on an H200 for a shape and a number of tokens: a tile of our own, or cuBLAS.

Rows come from `python -m stoker_kernels.bench_gemm` with a cold L2. Our kernels overlap with their neighbours by
programmatic dependent launch and need no second kernel for their sums or scales, so they are taken up to 2 µs (e4m3:
4 µs, cuBLAS there needs a kernel for the scales) behind an isolated cuBLAS.
Invariants: a shape that was not measured is treated as the measured one of its dtype whose N and K are nearest by
ratio; the answer for given (dtype, N, K, M) never changes within a process.
Does not know: what the shapes belong to, nor whether a kernel takes the operands (`gemm_small.refusal`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from stoker_kernels.gemm_small import MAX_TOKENS, SHARED_LIMIT, Tile, token_tile

PAIR_BYTES = 115_000  # shared memory of a CTA that leaves room for a second one on its SM


@dataclass(frozen=True, slots=True)
class Row:
    """One measured weight: our tile per token tile (8, 16, 32, 64, 128), and the most tokens that it is used for.

    Tiles read "rows x chunks" with "-" for a ring that leaves room for a second CTA: "64x2", "128x1-".
    """

    tiles: tuple[str, str, str, str, str]
    up_to: int


BF16: dict[tuple[int, int], Row] = {
    (4608, 3584): Row(("128x2", "64x2", "64x2", "64x2", "64x2"), 32),
    (3584, 3584): Row(("64x2-", "64x2-", "64x2", "64x2", "64x2"), 32),
    (37888, 3584): Row(("128x1-", "64x2", "64x2", "64x2", "128x1"), 64),
    (3584, 18944): Row(("64x2-", "64x2-", "64x1-", "64x2", "128x1"), 128),
    (2048, 1536): Row(("64x2-", "64x2-", "64x1-", "64x1", "64x1"), 32),
    (1536, 1536): Row(("64x1-", "64x1-", "64x1-", "64x1-", "64x1-"), 16),
    (17920, 1536): Row(("256x1", "128x2", "128x2", "128x1", "128x1"), 64),
    (1536, 8960): Row(("64x2-", "64x2-", "64x2-", "64x2", "64x2"), 64),
    (4096, 1024): Row(("64x2-", "64x2-", "64x1-", "64x1", "64x2"), 32),
    (1024, 2048): Row(("64x2", "64x2", "64x2", "64x1", "64x1-"), 16),
    (6144, 1024): Row(("64x2-", "64x2-", "64x1-", "64x1", "64x1"), 32),
    (1024, 3072): Row(("64x2", "64x2", "64x2-", "64x1", "64x1"), 64),
}
E4M3: dict[tuple[int, int], Row] = {
    (4608, 3584): Row(("128x2-", "128x1-", "128x1-", "128x1-", "64x1"), 32),
    (3584, 3584): Row(("64x2-", "64x2-", "64x1-", "64x2", "64x2"), 64),
    (37888, 3584): Row(("64x1", "64x2", "128x2", "128x2", "128x1"), 64),
    (3584, 18944): Row(("64x2", "64x2", "64x1-", "64x2", "128x1"), 64),
}


@functools.cache
def own_tile(fp8: bool, n: int, k: int, m: int) -> Tile:
    """Our best tile for a product of m ≤ 128 tokens with an [n, k] weight."""
    tokens = token_tile(m)
    text = _nearest(fp8, n, k).tiles[(8, 16, 32, 64, 128).index(tokens)]
    rows, chunks = (int(part) for part in text.rstrip("-").split("x"))
    budget = PAIR_BYTES if text.endswith("-") else SHARED_LIMIT
    rings = (Tile("sm90", rows, chunks, tokens, stages) for stages in range(16, 1, -1))
    return next(ring for ring in rings if ring.shared_bytes <= budget)


@functools.cache
def best_tile(fp8: bool, n: int, k: int, m: int) -> Tile | None:
    """Our best tile where it beats cuBLAS, else None."""
    return own_tile(fp8, n, k, m) if m <= min(MAX_TOKENS, _nearest(fp8, n, k).up_to) else None


def _nearest(fp8: bool, n: int, k: int) -> Row:
    table = E4M3 if fp8 else BF16
    key = min(table, key=lambda shape: abs(math.log(shape[0] / n)) + abs(math.log(shape[1] / k)))
    return table[key]
