"""The sizes of tiles of a mixture of experts, by rule: from the numbers of tokens, experts and SMs alone.

Invariants: pure. A tile holds tokens of one expert; a launch has room for the tiles of any routing.
Knows nothing of Triton.
"""

from __future__ import annotations

from typing import NamedTuple

# So few tokens are chosen for and sorted by one program, if their pairs are few enough to compare each with each, too.
# None of their experts has more than one tile.
FEW_TOKENS = 16
_FEW_PAIRS = 64
# Tokens of a program that chooses, a warp each: of all tokens, where it sorts them too, or of some of them.
ROUTE_TOKENS = (1, 4, 16)
SOME_TOKENS = 4
SORT_BLOCKS = (512, 4096)  # pairs that the sort of many reads at once
TOKEN_TILES = (16, 32, 64, 128)
# A tile should hold half as many tokens again as an expert gets in the mean, so that few experts need a second one,
# which would read the weights again.
_SLACK = 1.5
# Of experts in four bits a second tile is decoded again, but padding is multiplied for nothing by those who decode: the
# most tokens that an expert may get in the mean where a tile has so many.
_PACKED_MEANS = {16: 12, 32: 32, 64: 96}
_STREAMED = 32  # tokens of a tile up to which weights' bytes count, and not operations
_WAVES = 2  # of programs, so that the SMs end together
_FP8_WAVES = 8  # from which on fewer and larger programs are as even
_IN_TURN = 4  # programs an SM, from which on they follow each other


FIXED_TOKENS = 64  # of a tile at most, where a token's bits may not depend on the batch


class RowTile(NamedTuple):
    """How a program goes through its expert's weights: rows a tile, columns a step, warps, stages of the pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# Of weights in four bits, where an expert's rows are enough for all SMs: by tokens of a tile, for gate and up and for
# down, as measured on an H200. What a step decodes takes registers and shared memory by its format.
PACKED_TILES = {
    "mxfp4": {
        16: (RowTile(32, 256, 2, 3), RowTile(64, 256, 4, 3)),
        32: (RowTile(64, 256, 4, 2), RowTile(64, 256, 4, 3)),
        64: (RowTile(64, 256, 4, 2), RowTile(128, 256, 8, 2)),
    },
    "nvfp4": {
        16: (RowTile(64, 256, 4, 3), RowTile(64, 256, 4, 3)),
        32: (RowTile(64, 256, 4, 3), RowTile(128, 256, 8, 2)),
        64: (RowTile(64, 256, 4, 3), RowTile(128, 256, 8, 2)),
    },
    "int4": {
        16: (RowTile(64, 256, 4, 3), RowTile(64, 256, 4, 2)),
        32: (RowTile(64, 256, 4, 3), RowTile(64, 256, 4, 2)),
        64: (RowTile(64, 256, 4, 2), RowTile(128, 256, 8, 2)),
    },
}
BYTES_TILE = RowTile(64, 128, 4, 4)
LARGEST_PACKED_TILE = RowTile(128, 256, 8, 2)
# Where a token's bits may not depend on the batch: 64 rows are one instruction's for any number of tokens.
FIXED_TILE = RowTile(64, 64, 4, 4)
FIXED_PACKED_TILE = RowTile(64, 256, 4, 3)


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def in_one_program(tokens: int, top_k: int) -> bool:
    """Whether one program chooses and sorts for all tokens."""
    return tokens <= FEW_TOKENS and _least_tokens(tokens) * power_of_two(top_k) <= _FEW_PAIRS


def route_tokens(tokens: int, top_k: int) -> int:
    """For how many tokens a program chooses."""
    return _least_tokens(tokens) if in_one_program(tokens, top_k) else SOME_TOKENS


def _least_tokens(tokens: int) -> int:
    return next(rows for rows in ROUTE_TOKENS if rows >= tokens)


def sort_block(pairs: int) -> int:
    """How many pairs a program of the sort reads at once."""
    return next((block for block in SORT_BLOCKS if block >= pairs), SORT_BLOCKS[-1])


def token_tile(tokens: int, top_k: int, experts: int, *, packed: bool = False) -> int:
    """Tokens of a tile; `packed`: of experts in four bits."""
    if tokens <= FEW_TOKENS:
        return FEW_TOKENS
    mean = tokens * top_k / experts
    if packed:
        return next((tile for tile, most in _PACKED_MEANS.items() if mean <= most), TOKEN_TILES[-1])
    return next((tile for tile in TOKEN_TILES if tile >= _SLACK * mean), TOKEN_TILES[-1])


class PlanSizes(NamedTuple):
    """Tokens of a tile, tiles that there is room for, tokens that a program chooses for, whether one does for all."""

    tile: int
    most: int
    rows: int
    alone: bool


def plan_sizes(tokens: int, top_k: int, experts: int, *, packed: bool = False) -> PlanSizes:
    """The sizes of a step's plan."""
    return PlanSizes(
        token_tile(tokens, top_k, experts, packed=packed),
        most_tiles(tokens, top_k, experts, packed=packed),
        route_tokens(tokens, top_k),
        in_one_program(tokens, top_k),
    )


def fixed_sizes(tokens: int, top_k: int, experts: int) -> PlanSizes:
    """The same where all tokens are chosen for in one way, and tiles fit `FIXED_TILE` and `FIXED_PACKED_TILE`."""
    tile = min(token_tile(tokens, top_k, experts), FIXED_TOKENS)
    return PlanSizes(tile, tokens * top_k // tile + experts, SOME_TOKENS, alone=False)


def most_tiles(tokens: int, top_k: int, experts: int, *, packed: bool = False) -> int:
    """Tiles that the plan of a step has room for."""
    pairs = tokens * top_k
    if in_one_program(tokens, top_k):
        return min(pairs, experts)
    return pairs // token_tile(tokens, top_k, experts, packed=packed) + experts


def most_in_one(tokens: int, top_k: int, experts: int) -> int:
    """Tiles that one program lays out at most for so many tokens, as a power of two."""
    return max(2, power_of_two(min(tokens * top_k, experts)))


def packed_row_tile(kind: str, tile: int, tiles: int, rows: int, sms: int, *, gated: bool) -> RowTile:
    """As `row_tile`, for weights of four bits: 256 columns a step, and a warp for 16 rows, so that none decodes what
    another one does.
    """
    if tile == TOKEN_TILES[-1]:
        return LARGEST_PACKED_TILE
    chosen = PACKED_TILES[kind][tile][0 if gated else 1]
    if tile > _STREAMED or tiles * -(-rows // 32) > _IN_TURN * sms:
        return chosen
    # While the launch before still runs, each program brings in what its ring holds: a short one is better only where
    # programs follow each other on an SM.
    return RowTile(32, 256, 2, 4 if gated else 6) if tile <= FEW_TOKENS else RowTile(16, 256, 1, 4)


def row_tile(
    tile: int, tiles: int, rows: int, sms: int, *, gated: bool, as_fp8: bool = False, in_bytes: bool = False
) -> RowTile:
    """For tiles of so many tokens and weights of so many rows; `gated`: of gate and of up as many.

    `as_fp8`: the GPU multiplies FP8 as it is, if there are 64 rows; of fewer every warp makes 16 bits first.
    `in_bytes`: weights are integers of eight bits, which are made 16 bits.
    """
    if tile > _STREAMED:
        # Operations count: two warpgroups on 128 × 128 sums, of gate and of up.
        return RowTile(128, 64, 8, 3) if tile == TOKEN_TILES[-1] else RowTile(64, 64, 4, 4)
    if as_fp8 and tiles * -(-rows // 64) >= _FP8_WAVES * sms:
        return RowTile(64, 128, 4, 5)
    if in_bytes and tiles * -(-rows // 64) >= _FP8_WAVES * sms:
        return BYTES_TILE
    # Every SM shall stream some expert's rows: narrower tiles where there would be fewer programs than places.
    for wide in (64, 32):
        if tiles * -(-rows // wide) >= _WAVES * sms:
            return RowTile(wide // 2 if gated else wide, 128, 4, 4)
    return RowTile(16, 128, 4, 4)
