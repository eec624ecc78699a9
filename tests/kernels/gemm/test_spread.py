"""Tiles that spread a product over all SMs: the kernel on the emulator, which tiles there are, what they refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine
from tests.kernels.gemm.test_sm90_gemm import product, scaled_product

from stoker_kernels.gemm import bench, spread, table, tiles
from stoker_kernels.gemm.reference import sum_error
from stoker_kernels.gemm.small import Operands
from stoker_kernels.gemm.spread import SpreadTile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.quant import LinearWeight, Quantized

BF16 = torch.bfloat16
EVERY = [SpreadTile(rows, tokens, 1) for tokens, every in spread.ROWS.items() for rows in every]


@pytest.mark.parametrize("tile", EVERY, ids=lambda tile: f"{tile.rows}x{tile.tokens}")
def test_every_size_matches(machine: GemmMachine, tile: SpreadTile) -> None:
    # Two tiles and the eighth part of a third; 11 k blocks in unequal parts.
    tile = replace(tile, parts=random.Random(str(tile)).choice([2, 3, 4]))
    product(machine, tile, tile.tokens - 5, 2 * tile.rows + 8, 704)


@pytest.mark.matrix("share", "parts")
@pytest.mark.parametrize("tokens", spread.TOKENS)
@pytest.mark.parametrize(("share", "parts"), [(1, 1), (2, 1), (4, 1), (1, 8), (2, 3), (4, 2), (2, 4)])
def test_every_cluster_matches(machine: GemmMachine, tokens: int, share: int, parts: int) -> None:
    # 5 tiles, the last one in part: a cluster's last CTAs may have none.
    product(machine, SpreadTile(72, tokens, parts, share), tokens - 64, 328, 832)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("tokens", "share", "parts"), [(128, 1, 1), (128, 2, 3), (192, 1, 4), (256, 2, 2)])
def test_scaled_products_match(machine: GemmMachine, tokens: int, share: int, parts: int, biased: bool) -> None:
    scaled_product(machine, SpreadTile(104, tokens, parts, share), tokens - 1, 440, 640, biased=biased)


def test_a_bias_is_added_to_bf16(machine: GemmMachine) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*size, generator=generator).to(BF16) for size in ((99, 192), (168, 192), (168,)))
    machine.x, machine.out = x, torch.empty(99, 168, dtype=BF16)
    spread.launch(SpreadTile(80, 128, 3), Operands(x, weight, machine.out, bias), pdl=True)
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(machine.out.float(), want, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("k", [256, 4096])
def test_rings_of_each_length_match(machine: GemmMachine, k: int) -> None:
    product(machine, SpreadTile(136, 128, 2), 66, 272, k)


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize("seed", range(4))
def test_no_order_changes_a_bit(machine: GemmMachine, seed: int) -> None:
    tile = SpreadTile(88, 128, 3, 2)
    plain = product(machine, tile, 100, 360, 2560)
    machine.seed = seed + 1
    assert torch.equal(product(machine, tile, 100, 360, 2560), plain)


def test_a_token_has_the_same_bits_at_every_place_and_beside_any_others(machine: GemmMachine) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(1, 1024, generator=generator).to(BF16), torch.randn(240, 1024, generator=generator).to(BF16)
    rows = []
    for m in (1, 65, 190):
        machine.x, machine.out = x.repeat(m, 1), torch.empty(m, 240, dtype=BF16)
        spread.launch(SpreadTile(96, 192, 4), Operands(machine.x, weight, machine.out), pdl=True)
        rows.append(machine.out)
    assert torch.equal(torch.cat(rows), rows[0].expand(256, -1))


@pytest.mark.parametrize("m", [65, 128, 129, 192, 200, 256])
@pytest.mark.parametrize("seed", range(20))
def test_tiles_worth_timing_are_compiled_and_run_at_once(m: int, seed: int) -> None:
    draw = random.Random(seed)
    n, k_blocks = 8 * draw.randrange(128, 4096), draw.randrange(2, 400)
    found = list(spread.spread_tiles(n, 128 * k_blocks, m))
    assert len(set(found)) == len(found)
    for tile in found:
        assert m <= tile.tokens < m + 64
        assert tile.shared_bytes <= HOPPER_SHARED
        assert tile.stages >= 2
        assert spread.SMS_AT_WORK <= tile.clusters(n) * tile.cluster <= 132
        assert 2 * tile.parts <= k_blocks


def test_there_is_a_tile_for_nearly_every_weight_of_a_decoder() -> None:
    for n in range(1024, 16385, 128):
        every = [tile for m in (128, 192, 256) for tile in spread.spread_tiles(n, 8192, m)]
        assert {tile.tokens for tile in every} == {128, 192, 256}, n


def test_no_tile_is_for_few_tokens_or_many() -> None:
    assert not [*spread.spread_tiles(4096, 8192, 64), *spread.spread_tiles(4096, 8192, 257)]


def test_what_does_not_fit_is_named() -> None:
    o = Operands(torch.ones(70, 128).to(BF16), torch.ones(96, 128).to(BF16), torch.empty(70, 96, dtype=BF16))
    assert tiles.refusal(SpreadTile(64, 128, 2), o) is None
    assert "into 3 parts" in str(tiles.refusal(SpreadTile(64, 128, 3), o))
    assert "not in 1…128" in str(tiles.refusal(SpreadTile(64, 128, 1), replace(o, x=torch.ones(129, 128).to(BF16))))
    assert "K = 100" in str(tiles.refusal(SpreadTile(64, 128, 1), replace(o, weight=torch.ones(96, 100).to(BF16))))


def test_a_tile_that_is_not_compiled_is_none() -> None:
    assert SpreadTile(136, 128, 2).compiled
    wrong = [(68, 128, 2), (64, 128, 3, 3), (64, 128, 5, 2), (64, 64, 2), (176, 256, 4), (224, 192, 1)]
    assert not any(SpreadTile(*each).compiled for each in wrong)


def test_the_rule_spreads_what_wide_and_narrow_tiles_leave_uneven() -> None:
    assert table.best_tile(False, 5248, 6656, 100) == SpreadTile(80, 128, 2)  # 132 CTAs
    assert table.best_tile(False, 5248, 13312, 100) == SpreadTile(88, 128, 2, 4)  # enough of K to read x together
    assert table.best_tile(True, 5248, 19712, 180) == SpreadTile(88, 192, 2, 4)
    assert table.best_tile(False, 10048, 6016, 150) is None  # cuBLAS has tiles of 160 tokens
    assert table.best_tile(False, 10048, 6016, 170) == SpreadTile(88, 192, 1, 4)
    assert table.best_tile(False, 20480, 6016, 90) == WideTile(160, False, False)  # as even, and faster
    for few, many in ((64, 65), (193, 192), (208, 209)):
        assert not isinstance(table.best_tile(False, 5248, 6656, few), SpreadTile)
        assert isinstance(table.best_tile(False, 5248, 6656, many), SpreadTile)
    assert table.best_tile(False, 10048, 6016, 240) is None
    assert not isinstance(table.best_tile(True, 5248, 6656, 100), SpreadTile)  # too short a row to cut


@pytest.mark.parametrize("text", ["136s128k3", "80s192m4k2", "64s256k1", "72s128m2k3"])
def test_a_tile_is_named(text: str) -> None:
    tile = table.parse_spread(text)
    assert table.text_of(tile) == text
    assert table.named(text, False, False, tile.tokens) == tile


@pytest.mark.parametrize(
    ("text", "m"),
    [("136s128k3", 192), ("68s128k3", 128), ("64s192k2-", 192), ("64s192m3k2", 192), ("64sk2", 128)],
)
def test_a_name_of_no_tile_is_refused(text: str, m: int) -> None:
    with pytest.raises(ValueError, match="is no tile"):
        table.named(text, False, False, m)
    with pytest.raises(ValueError, match="is no tile"):
        table.named("136s128k3", False, True, 128)  # not of gate and up


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("seed", range(12))
def test_random_products_match_on_the_device(fp8: bool, seed: int) -> None:
    draw = random.Random(seed)
    m, n, k = draw.randrange(1, 257), 8 * draw.randrange(16, 2048), 128 * draw.randrange(4, 100)
    torch.manual_seed(seed)
    o = bench.random_operands(m, n, k, fp8, bias=bool(seed % 2))
    x = Quantized(o.x, o.x_scale) if o.x_scale is not None else o.x
    wanted, error = bench.exact(o), sum_error(x, LinearWeight(o.weight, o.w_scale, "fp8_channel" if fp8 else "dense"))
    for tokens in (size for size in spread.TOKENS if size >= m):
        rows = draw.choice(spread.ROWS[tokens])
        share, parts = draw.choice([(1, 1), (1, 3), (2, 2), (4, 1), (4, 2), (1, 4)])
        tile = SpreadTile(rows, tokens, parts, share)
        assert tile.compiled
        assert tiles.refusal(tile, o) is None
        o.out.fill_(float("nan"))
        tiles.launch(tile, o, pdl=False)
        assert bench.complaint(o.out, wanted, error) is None, tile
