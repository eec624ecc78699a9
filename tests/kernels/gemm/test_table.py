import pytest

from stoker_kernels.gemm import table
from stoker_kernels.gemm.small import TOKEN_TILES
from stoker_kernels.launch.chip import HOPPER_SHARED


@pytest.mark.parametrize("fp8", [False, True])
def test_every_entry_is_a_tile_that_fits(fp8: bool) -> None:
    for n, k in table.E4M3 if fp8 else table.BF16:
        for tokens in TOKEN_TILES:
            tile = table.own_tile(fp8, n, k, tokens)
            assert tile.tokens == tokens
            assert tile.stages >= 2
            assert tile.shared_bytes <= HOPPER_SHARED
            assert tile.cluster <= 8
            assert tile.family == "cluster" or (tile.tokens > 32 and tile.cluster > 1)


@pytest.mark.parametrize("fp8", [False, True])
def test_more_tokens_never_go_back_to_our_kernel(fp8: bool) -> None:
    for n, k in table.E4M3 if fp8 else table.BF16:
        ours = [table.best_tile(fp8, n, k, m) is not None for m in range(1, 129)]
        assert ours == sorted(ours, reverse=True)
        assert ours[0]


@pytest.mark.parametrize(
    ("n", "m", "ours"),
    [
        (3584, 2048, True),  # 8 pairs of tiles × 16 blocks of tokens: 128 of 2 · 66; 256 rows a tile: 224 of 264
        (3584, 4096, True),
        (3584, 2816, False),  # 176 of 3 · 66
        (3584, 8192, False),  # full either way
        (3584, 896, False),
        (4608, 4096, False),  # a quarter of the last pair's rows is there
        (152064, 4096, False),
    ],
)
def test_a_plain_product_gets_wide_tiles_where_those_of_cublas_leave_sms_idle(n: int, m: int, ours: bool) -> None:
    assert table.best_tile(False, n, 3584, m) == (table.BF16_TILE if ours else None)


def test_an_unknown_shape_takes_the_nearest_row() -> None:
    assert table.own_tile(False, 128256, 3584, 1) == table.own_tile(False, 152064, 3584, 1)
    assert table.own_tile(False, 3400, 3700, 1) == table.own_tile(False, 3584, 3584, 1)


@pytest.mark.parametrize(
    "text", ["64x2k4", "64x1k2-", "128x2k2", "64x1k8=", "128x1m2k4", "128x1m1k4-"]
)
@pytest.mark.parametrize("tokens", TOKEN_TILES)
def test_text_names_a_tile_and_back(text: str, tokens: int) -> None:
    tile = table.parse(text, tokens)
    assert table.text_of(tile) == text
    assert tile.tokens == tokens
    assert tile.shared_bytes <= HOPPER_SHARED


@pytest.mark.parametrize("text", ["64", "64x2", "64x2k", "x2k1", "64x2k1+", "256x2k1-"])
def test_what_is_no_tile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        table.parse(text, 128)


def test_rows_count_more_than_k_for_the_nearest_weight() -> None:
    assert table.own_tile(False, 6080, 9000, 16) == table.own_tile(False, 6144, 4096, 16)


def test_a_multicast_tile_that_would_need_two_rounds_gives_way_to_cublas() -> None:
    # 2,560 rows are 40 clusters of five with half of an SM each, of 44 that fit; 2,848 rows are 45.
    assert table.best_tile(False, 2560, 2496, 128) == table.own_tile(False, 2848, 2496, 128)
    assert table.best_tile(False, 2848, 2496, 128) is None
    assert table.best_tile(False, 2848, 2496, 64) is not None
