"""Which compiled kernel takes a product of a weight in fragments."""

from __future__ import annotations

import random

import pytest

from stoker_kernels.fragment_gemm import NUMBERS, Numbers, Tile
from stoker_kernels.fragment_gemm.tiles import INT4, MAX_SPLIT, choice_for


@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: f"{numbers.form}-{numbers.name}")
@pytest.mark.parametrize("sms", [1, 78, 132])
def test_a_choice_takes_its_tokens_and_leaves_no_cta_without_columns(sms: int, numbers: Numbers) -> None:
    generator = random.Random(sms)
    for n, k in ((64, 64), (4608, 3584), (192, 18944), (152064, 8192)):
        for tokens in (1, 1024, *(generator.randrange(2, 1024) for _ in range(12))):
            tile, split = choice_for(numbers, tokens, n, k, lambda tile, split: sms * tile.ctas // split)
            assert tile.tokens >= min(tokens, 128)
            assert 1 <= split <= MAX_SPLIT
            assert -(-k // numbers.columns_at_once(tile)) >= split


def test_a_weight_of_one_wave_is_not_split_and_a_narrow_one_is() -> None:
    """132 SMs: 130 tiles of 320 rows fill most of them; 14 tiles of 256 rows leave most idle."""
    tile, split = choice_for(INT4, 100, 130 * 320, 4096, h200)
    assert (tile.rows, split) == (320, 1)
    assert choice_for(INT4, 100, 14 * 256, 16384, h200)[1] > 3


def test_clusters_that_would_not_fit_at_once_are_not_chosen() -> None:
    for tokens in (90, 128, 250):
        for n, k in ((3584, 18944), (4608, 3584), (5120, 17408)):
            tile, split = choice_for(INT4, tokens, n, k, h200)
            assert -(-n // tile.rows) * -(-tokens // tile.tokens) <= h200(tile, split)


def test_with_a_given_cut_the_kernel_alone_is_chosen() -> None:
    """As batch invariance wants it: every number of tokens takes the same cut, by a kernel that holds them."""
    for n, k in ((3584, 18944), (4608, 3584), (70 * 64, 1152)):
        for split in (1, 3, 7):
            for tokens in (16, 47, 90, 1024):
                tile, found = choice_for(INT4, tokens, n, k, h200, split)
                assert found == split
                assert tile.groups
                assert tile.tokens >= min(tokens, 128)


def h200(tile: Tile, split: int) -> int:
    """How many clusters of 1 to 8 CTAs an H200 was found to hold, one of them on an SM."""
    return (132, 66, 39, 30, 22, 17, 15, 15)[split - 1] * tile.ctas
