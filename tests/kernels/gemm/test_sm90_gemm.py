"""The GEMM kernels with clusters, launched by their own host code and run on the CPU by `emulator/`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels.gemm import fixed, gated, small, table, tiles, wide
from stoker_kernels.gemm.reference import linear_fp64, linear_silu_mul
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.wide import WideTile, pairing
from stoker_kernels.quant import FP8, LinearWeight, quantize_fp8, quantize_weight

BF16 = torch.bfloat16


def product(machine: GemmMachine, tile: AnyTile, m: int, n: int, k: int, resident: int = 1) -> torch.Tensor:
    """Runs a tile on random operands; checks every value and that nothing around the result is written."""
    generator = torch.Generator().manual_seed(m * n + k)
    x_space = torch.randn(m, k + 8, generator=generator).to(BF16)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(BF16)
    machine.x, machine.resident = x_space, resident
    x = x_space[:, :k]
    return checked(machine, tile, Operands(x, weight, torch.empty(0)), x.float() @ weight.float().T)


def scaled_product(
    machine: GemmMachine, tile: AnyTile, m: int, n: int, k: int, resident: int = 1, biased: bool = False
) -> torch.Tensor:
    """`product` of e4m3 operands with their scales, x and its scales still being written when the kernel starts."""
    generator = torch.Generator().manual_seed(m * n + k)
    x = quantize_fp8(torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator))
    weight = quantize_weight(torch.randn(n, k, generator=generator) * k**-0.5, "fp8_channel")
    bias = torch.randn(n, generator=generator).to(BF16) if biased else None
    space = torch.empty(m * (k + 16) + 4 * m, dtype=torch.uint8)
    data = space[: m * (k + 16)].view(FP8).view(m, k + 16)[:, :k]
    scale = space[m * (k + 16) :].view(torch.float32).view(m, 1)
    data.view(torch.uint8).copy_(x.data.view(torch.uint8))
    scale.copy_(x.scale)
    machine.x, machine.resident = space, resident
    want = linear_fp64(x, weight, bias).float()
    return checked(machine, tile, Operands(data, weight.data, torch.empty(0), bias, weight.scale, scale), want)


def checked(machine: GemmMachine, tile: AnyTile, o: Operands, want: torch.Tensor) -> torch.Tensor:
    if tile.gated:
        gate, up = want.chunk(2, dim=1)
        want = gate * torch.sigmoid(gate) * up
    m, columns = want.shape
    out_space = torch.full((m + 3, columns + 24), float("nan"), dtype=BF16)
    out = out_space[1 : m + 1, 8 : columns + 8]
    machine.out, o = out_space, replace(o, out=out)
    assert tiles.refusal(tile, o) is None
    if isinstance(tile, Tile):
        small.launch(tile, o, pdl=True)
    else:
        tiles.launch(tile, o, pdl=True)
    torch.testing.assert_close(out.float(), want, rtol=2.0**-8, atol=1e-4)
    result = out.clone()
    out.fill_(float("nan"))
    assert out_space.isnan().all()
    return result


PLAIN_OR_GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
PAIRS = pytest.mark.parametrize("by_tokens", [False, True], ids=["by rows", "by tokens"])


@pytest.mark.matrix("m")
@PAIRS
@PLAIN_OR_GATED
@pytest.mark.parametrize("m", [65, 96, 127, 128, 129, 255, 300])
def test_wide_tiles_match_at_each_number_of_tokens(machine: GemmMachine, by_tokens: bool, m: int, gated: bool) -> None:
    # 2 pairs of 576 or 448 rows and a tile of 48 rows, which its second CTA has none of.
    rows = 288 if gated else 224
    product(machine, WideTile(rows, gated, by_tokens), m, 4 * rows + 48, 192, resident=2)


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("tile", [*wide.wide_tiles(False, False, 8192), *wide.wide_tiles(True, False, 8192)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (304, 128), (624, 320), (560, 3584)])
def test_wide_tiles_match_at_each_shape(machine: GemmMachine, tile: WideTile, n: int, k: int) -> None:
    product(machine, tile, 70, n, k)


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("tile", [tile for tile in wide.wide_tiles(True, False, 8192) if tile.tokens != 128], ids=str)
@pytest.mark.parametrize("m", [1, 63, 65, 191, 193, 400])
def test_wide_tiles_of_other_numbers_of_tokens_match(machine: GemmMachine, tile: WideTile, m: int) -> None:
    product(machine, tile, m, 4 * tile.rows + 48, 192, resident=2)


def test_rows_that_cannot_be_halved_are_not_shared(machine: GemmMachine) -> None:
    o = Operands(torch.ones(200, 64).to(BF16), torch.ones(288, 64).to(BF16), torch.empty(200, 144, dtype=BF16))
    assert "cannot be halved" in str(wide.refusal(WideTile(272, True, True), o))
    assert wide.refusal(WideTile(272, True), o) is None
    assert not pairing(WideTile(272, True), 2176, 1024, 66).by_tokens


@pytest.mark.matrix("rows", "gated", "by_tokens")
@PAIRS
@PLAIN_OR_GATED
@pytest.mark.parametrize(("m", "n", "k"), [(70, 1200, 128), (129, 1200, 384), (300, 624, 640), (65, 16, 3584)])
@pytest.mark.parametrize("rows", wide.ROWS)
def test_wide_tiles_scale_e4m3(
    machine: GemmMachine, by_tokens: bool, gated: bool, m: int, n: int, k: int, rows: int
) -> None:
    scaled_product(machine, WideTile(rows, gated, by_tokens), m, n, k, resident=2)


@PAIRS
@pytest.mark.parametrize("rows", [224, 256, 288])
def test_wide_tiles_add_a_bias_to_e4m3(machine: GemmMachine, by_tokens: bool, rows: int) -> None:
    scaled_product(machine, WideTile(rows, False, by_tokens), 150, 616, 256, resident=2, biased=True)


@pytest.mark.matrix("resident")
@PAIRS
@pytest.mark.parametrize(("rows", "gated", "tiles"), [(224, False, (12, 14)), (288, True, (9, 10))])
@pytest.mark.parametrize("resident", [1, 4, 5, 66])
def test_clusters_take_tiles_in_turn(
    machine: GemmMachine, by_tokens: bool, rows: int, gated: bool, tiles: tuple[int, int], resident: int
) -> None:
    product(machine, WideTile(rows, gated, by_tokens), 300, 1408, 256, resident)
    assert machine.clusters == min(resident, tiles[by_tokens])


@PAIRS
def test_tokens_beyond_a_group_of_blocks_match(machine: GemmMachine, by_tokens: bool) -> None:
    product(machine, WideTile(224, False, by_tokens), 17 * 128 + 5, 640, 64, resident=3)


@pytest.mark.matrix("by_tokens", take=2)
@PAIRS
@pytest.mark.parametrize("seed", range(4))
def test_no_order_changes_a_bit(machine: GemmMachine, by_tokens: bool, seed: int) -> None:
    plain = product(machine, WideTile(288, True, by_tokens), 200, 800, 448)
    machine.seed = seed + 1
    assert torch.equal(product(machine, WideTile(288, True, by_tokens), 200, 800, 448, resident=1 + seed), plain)


@PAIRS
def test_a_token_has_the_same_bits_in_every_batch(machine: GemmMachine, by_tokens: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 256, generator=generator).to(BF16) for rows in (150, 608))
    results = []
    for m in (65, 150):
        machine.x, machine.out = x[:m].clone(), torch.empty(m, 304, dtype=BF16)
        wide.launch(WideTile(288, True, by_tokens), Operands(machine.x, weight, machine.out), pdl=True)
        results.append(machine.out[:65])
    assert torch.equal(*results)


def cluster_tile(rows: int, chunks: int, tokens: int, cluster: int, gated: bool, stages: int = 3) -> Tile:
    return Tile("cluster", rows, chunks, tokens, stages, 1, cluster, gated)


@pytest.mark.matrix("tokens", "cluster")
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("rows", "chunks"), [(64, 1), (64, 2), (128, 1)])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_gated_clusters_match(machine: GemmMachine, rows: int, chunks: int, tokens: int, cluster: int) -> None:
    # 9 or 5 tiles of rows, the last one in part: with 2 CTAs or 4, whole tiles and a shared one.
    tile = cluster_tile(rows, chunks, tokens, cluster, gated=True)
    product(machine, tile, tokens - 3, 560, 832)
    product(machine, tile, 1, 16, 512)


@pytest.mark.parametrize(("tile", "m"), [((64, 1, 32, 2), 19), ((64, 2, 8, 3), 8), ((128, 1, 64, 4), 64)])
def test_plain_clusters_match(machine: GemmMachine, tile: tuple[int, int, int, int], m: int) -> None:
    product(machine, cluster_tile(*tile, gated=False), m, 1112, 448, resident=2 if tile[3] == 2 else 1)


@pytest.mark.parametrize(("k", "stages"), [(64, 2), (2048, 2), (2048, 8)])
def test_gated_rings_of_each_length_match(machine: GemmMachine, k: int, stages: int) -> None:
    product(machine, cluster_tile(64, 1, 16, 1, True, stages), 13, 192, k, resident=2)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_changes_a_bit_of_a_gated_cluster(machine: GemmMachine, seed: int) -> None:
    tile = cluster_tile(64, 1, 32, 4, gated=True)
    plain = product(machine, tile, 30, 320, 640)
    machine.seed = seed + 1
    assert torch.equal(product(machine, tile, 30, 320, 640), plain)


@pytest.mark.parametrize("long", [7, 8], ids=["a long K", "a short K"])
def test_a_fixed_product_has_the_same_bits_for_any_number_of_tokens(
    machine: GemmMachine, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    # 5 tiles whose 7 k blocks are cut into four parts. 137 tokens take a wide tile, which adds part after part, or of a
    # long K two tiles whose clusters do.
    monkeypatch.setattr(fixed, "LONG", long)
    monkeypatch.setattr(tiles, "pdl_on", lambda _: True)
    monkeypatch.setattr(fixed, "token_tile", compiled_tile)
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(rows, 448, generator=generator).to(BF16) for rows in (137, 296))
    bias = torch.randn(296, generator=generator).to(BF16)
    machine.resident = 3

    def product_of(rows: slice) -> torch.Tensor:
        return fixed.linear(x[rows].clone(), LinearWeight(weight), bias=bias, out=None)

    assert fixed.parts_of(296, 7) == 4
    whole = product_of(slice(0, 137))
    want = linear_fp64(x, LinearWeight(weight), bias)
    torch.testing.assert_close(whole.double(), want, rtol=2.0**-8, atol=1e-3)
    assert product_of(slice(0, 0)).shape == (0, 296)
    for first, last in ((0, 1), (130, 137), (5, 29), (50, 100), (7, 120)):
        assert torch.equal(product_of(slice(first, last)), whole[first:last])


def compiled_tile(tokens: int) -> int:
    """The token tiles that the emulator's library has of the plain family."""
    return next(each for each in (8, 32, 64, 128) if tokens <= each)


def test_fixed_gate_and_up_have_the_same_bits_beside_any_neighbour(
    machine: GemmMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "pdl_on", lambda _: True)
    generator = torch.Generator().manual_seed(8)
    x, weight = (torch.randn(rows, 320, generator=generator).to(BF16) for rows in (140, 608))

    def product_of(rows: slice) -> torch.Tensor:
        found = fixed.linear_silu_mul(x[rows].clone(), LinearWeight(weight))
        assert isinstance(found, torch.Tensor)
        return found

    whole = product_of(slice(0, 140))
    torch.testing.assert_close(whole, linear_silu_mul(x, LinearWeight(weight)), rtol=2.0**-5, atol=0.5)
    for first, last in ((0, 1), (1, 3), (130, 140), (5, 29), (3, 60), (7, 120)):
        assert torch.equal(product_of(slice(first, last)), whole[first:last])


@pytest.mark.matrix("share", "split")
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize(("share", "split"), [(1, 2), (2, 4), (4, 2), (2, 3)])
def test_parts_of_clusters_and_of_wide_tiles_have_the_same_sums(
    machine: GemmMachine, tokens: int, share: int, split: int
) -> None:
    # 13 k blocks in unequal parts; the last tile in part.
    shared = product(machine, multicast_tile(64, tokens, share, split), tokens - 3, 568, 832)
    for rows in wide.rows_of(False, False, split)[wide.TOKENS]:
        assert torch.equal(product(machine, WideTile(rows, False, None, split), tokens - 3, 568, 832), shared)


@pytest.mark.parametrize(("rows", "split"), [(128, 1), (160, 1), (192, 1), (224, 1), (128, 2), (128, 3), (128, 4)])
def test_fixed_wide_tiles_scale_e4m3(machine: GemmMachine, rows: int, split: int) -> None:
    scaled_product(machine, WideTile(rows, False, None, split), 150, 616, 640, resident=2, biased=True)


def multicast_tile(rows: int, tokens: int, share: int, split: int, stages: int = 3) -> Tile:
    return Tile("multicast", rows, 1, tokens, stages, 1, share * split, share=share)


@pytest.mark.matrix("rows", "tokens", take=2)
@pytest.mark.parametrize(("share", "split"), [(1, 3), (1, 8), (2, 1), (2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize(("rows", "tokens"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_multicast_tiles_match(machine: GemmMachine, rows: int, tokens: int, share: int, split: int) -> None:
    # 9 or 5 tiles, the last one in part: a cluster's last CTAs may have none. 13 k blocks in unequal parts.
    product(machine, multicast_tile(rows, tokens, share, split), tokens - 3, 560, 832)


@pytest.mark.parametrize(("k", "stages"), [(256, 2), (256, 7), (2048, 2), (2048, 7)])
def test_multicast_rings_of_each_length_match(machine: GemmMachine, k: int, stages: int) -> None:
    product(machine, multicast_tile(128, 128, 2, 4, stages), 128, 512, k)


@pytest.mark.parametrize(("k", "share", "split"), [(64, 2, 1), (128, 1, 2), (448, 1, 7), (512, 1, 8)])
def test_a_multicast_tile_fits_a_weight_with_few_k_blocks(machine: GemmMachine, k: int, share: int, split: int) -> None:
    tile = small.fitted(multicast_tile(64, 64, 1, 8), torch.empty(192, k, dtype=BF16))
    assert (tile.share, tile.split) == (share, split)
    product(machine, tile, 50, 192, k)


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize("seed", range(6))
def test_no_order_changes_a_bit_of_a_multicast_tile(machine: GemmMachine, seed: int) -> None:
    tile = multicast_tile(64, 64, 2, 4)
    plain = product(machine, tile, 60, 320, 2560)
    machine.seed = seed + 1
    assert torch.equal(product(machine, tile, 60, 320, 2560), plain)


def test_a_token_has_the_same_bits_at_every_place(machine: GemmMachine) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(1, 1024, generator=generator).to(BF16), torch.randn(128, 1024, generator=generator).to(BF16)
    machine.x, machine.out = x.repeat(61, 1), torch.empty(61, 128, dtype=BF16)
    small.launch(multicast_tile(64, 64, 2, 4), Operands(machine.x, weight, machine.out), pdl=True)
    assert torch.equal(machine.out, machine.out[:1].expand(61, -1))


@pytest.mark.parametrize("m", [1, 9, 33, 64, 65, 130])
def test_the_op_runs_the_tile_of_its_table(machine: GemmMachine, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    monkeypatch.setattr(tiles, "pdl_on", lambda _: True)
    monkeypatch.setattr(gated, "split", None)
    row = table.GatedRow(("64x2k1=", "64x2k1=", "64x1k1=", "64x1k2"), ((8192, "288"),))
    monkeypatch.setattr(table, "GATED", {(624, 512): row})
    monkeypatch.setattr(table, "nearest_gated", lambda fp8, n, k: row)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, 512, generator=generator).to(BF16)
    weight = (torch.randn(624, 512, generator=generator) * 512**-0.5).to(BF16)
    machine.x, machine.out, machine.resident = x, torch.empty(0), 2
    got = gated.fused(x, LinearWeight(weight))
    torch.testing.assert_close(
        got, linear_silu_mul(x.float(), LinearWeight(weight.float())).to(BF16), rtol=0.01, atol=1e-3
    )
    named = table.gated_tile(False, 624, 512, m)
    kind = "wide_gated_n288" if m > table.GATED_SMALL else f"gated_n{named.rows}"
    assert machine.ran.startswith(f"sm90_bf16_gemm_{kind}")


@pytest.mark.parametrize(
    ("m", "by_tokens", "rounds"), [(65, False, 1), (128, False, 1), (256, True, 2), (300, False, 3), (1024, True, 8)]
)
def test_pairs_go_by_tokens_where_that_costs_no_round(m: int, by_tokens: bool, rounds: int) -> None:
    dealt = pairing(WideTile(288, gated=True), 37888, m, 66)
    assert dealt.by_tokens is by_tokens
    assert -(-dealt.tiles // 66) == rounds
    assert not pairing(WideTile(288, True, by_tokens=False), 37888, m, 66).by_tokens
