"""Products of 8-bit integers by the tiles of FP8, launched by their own host code and run on the CPU by `emulator/`.

Sums are exact and each step is rounded as the reference does it, so every result is compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels.gemm import int8_tiles, spread, table, tiles, wide
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.spread import SpreadTile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.int8_gemm import int8_linear
from stoker_kernels.quant import Int8Weight, Quantized, quantize_int8

BF16 = torch.bfloat16
PLAIN_WIDE = [tile for tile in wide.wide_tiles(False, True, 8192) if wide.of_integers(tile)]
GATED_WIDE = [tile for tile in wide.wide_tiles(True, True, 8192) if wide.of_integers(tile)]
SPREAD = [SpreadTile(rows, tokens, 1) for tokens, every in spread.INTEGER_ROWS.items() for rows in every]


def integers(rows: int, columns: int) -> torch.Tensor:
    """Of the whole range, with long runs of its ends: sums beyond what fp32 holds exactly."""
    drawn = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    drawn[random.randrange(rows)] = 127
    return drawn


def product(machine: GemmMachine, tile: AnyTile, m: int, n: int, k: int, resident: int = 1) -> torch.Tensor:
    """Random operands, x and its scales still being written when the kernel starts; nothing around the result is."""
    weight = Int8Weight(integers(n, k), torch.rand(n, 1) * 0.01 + 1e-4)
    bias = torch.randn(n).to(BF16) if not tile.gated and random.random() < 0.5 else None
    space = torch.zeros(m * (k + 16) + 4 * m, dtype=torch.uint8)
    data = space[: m * (k + 16)].view(torch.int8).view(m, k + 16)[:, :k]
    scale = space[m * (k + 16) :].view(torch.float32).view(m, 1)
    data.copy_(integers(m, k))
    scale.copy_(torch.rand(m, 1) + 1e-3)
    want = int8_linear(Quantized(data.contiguous(), scale.clone()), weight, bias=bias, out=torch.empty(m, n))
    if tile.gated:
        gate, up = want.chunk(2, dim=1)
        want = gate * torch.sigmoid(gate) * up
    columns = want.shape[1]
    out_space = torch.full((m + 3, columns + 24), float("nan"), dtype=BF16)
    out = out_space[1 : m + 1, 8 : columns + 8]
    machine.x, machine.out, machine.resident, machine.seed = space, out_space, resident, random.randrange(1 << 30)
    operands = Operands(data, weight.data, out, bias, weight.scale, scale)
    assert tiles.refusal(tile, operands) is None
    tiles.launch(tile, operands, pdl=True)
    if tile.gated:
        torch.testing.assert_close(out.float(), want, rtol=2.0**-8, atol=1e-4)
    else:
        assert torch.equal(out, want.to(BF16))
    result = out.clone()
    out.fill_(float("nan"))
    assert out_space.isnan().all()
    return result


def odd_k() -> int:
    """A K of some blocks, at least four."""
    return 128 * random.randint(4, 11)


@pytest.mark.matrix("tokens")
@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("rows", "chunks"), [(64, 1), (64, 2), (128, 1), (128, 2)])
def test_clusters_match(int8_machine: GemmMachine, rows: int, chunks: int, tokens: int) -> None:
    for cluster in (1, random.randint(2, 4)):
        tile = Tile("cluster", rows, chunks, tokens, 2, 1, cluster)
        n = 8 * random.randint(2, 60)
        product(int8_machine, tile, random.randint(1, tokens), n, 2 * odd_k(), resident=-(-n // rows))


@pytest.mark.matrix("rows", "tokens")
@pytest.mark.parametrize(("share", "split"), [(1, 3), (1, 8), (2, 1), (2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize(("rows", "tokens"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_multicast_tiles_match(int8_machine: GemmMachine, rows: int, tokens: int, share: int, split: int) -> None:
    tile = Tile("multicast", rows, 1, tokens, 3, 1, share * split, share=share)
    product(int8_machine, tile, random.randint(1, tokens), 8 * random.randint(8, 70), 2 * odd_k())


@pytest.mark.matrix(take=6)
@pytest.mark.parametrize("tile", SPREAD, ids=lambda tile: f"{tile.rows}x{tile.tokens}")
def test_spread_tiles_match(int8_machine: GemmMachine, tile: SpreadTile) -> None:
    share, parts = random.choice([(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (4, 2)])
    tile = SpreadTile(tile.rows, tile.tokens, parts, share)
    product(int8_machine, tile, random.randint(1, tile.tokens), 8 * random.randint(2, 60), 2 * odd_k())


@pytest.mark.matrix(take=6)
@pytest.mark.parametrize("tile", [*PLAIN_WIDE, *GATED_WIDE], ids=str)
def test_wide_tiles_match(int8_machine: GemmMachine, tile: WideTile) -> None:
    n = (16 if tile.gated else 8) * random.randint(2, 70)
    product(int8_machine, tile, random.randint(1, 300), n, odd_k(), resident=random.randint(1, 4))


def test_sums_beyond_those_of_floats_are_exact(int8_machine: GemmMachine) -> None:
    """127 · 127 · K is more than 2^24 and odd in its last places."""
    k = 128 * random.randint(10, 20)
    x, weight = torch.full((3, k), 127, dtype=torch.int8), torch.full((64, k), 127, dtype=torch.int8)
    x[1, 5], weight[7, 9] = 126, 126
    assert int(x[0].int() @ weight[0].int()) > 2**24
    scale, unit = torch.tensor([[2.0**-24], [1.0], [0.3]]), Int8Weight(weight, torch.ones(64, 1))
    want = int8_linear(Quantized(x, scale), unit)
    for tile in (Tile("cluster", 64, 1, 8, 3, 1, 3), Tile("multicast", 64, 1, 64, 3, 1, 4), WideTile(128, False),
                 SpreadTile(80, 128, 3)):  # fmt: skip
        out = torch.empty(3, 64, dtype=BF16)
        tiles.launch(tile, Operands(x, weight, out, None, unit.scale, scale), pdl=True)
        assert torch.equal(out, want)


def shapes() -> Iterator[tuple[int, int, int]]:
    """As many of few tokens, of some and of many: each has tiles of its own."""
    for least, most in ((1, 64), (65, 256), (257, 9000)):
        for _ in range(200):
            yield 8 * random.randint(2, 6000), 128 * random.randint(1, 160), random.randint(least, most)


def test_every_shape_has_a_compiled_tile() -> None:
    """Whatever the rule for e4m3 names: one that takes the operands."""
    kinds = set()
    for n, k, m in shapes():
        for gated in (False, True):
            tile = int8_tiles.gated_tile_for(2 * n, k, m) if gated else int8_tiles.tile_for(n, k, m)
            if tile is None:
                assert gated
                continue
            kinds.add((type(tile), gated))
            if isinstance(tile, SpreadTile):
                assert tile.compiled
                assert tile.rows in spread.INTEGER_ROWS[tile.tokens]
                assert tile.rows >= 64
            elif isinstance(tile, WideTile):
                assert wide.of_integers(tile)
            else:
                assert not gated
                assert m <= tile.tokens
                assert (tile.rows, tile.chunks) in table.SMALL_KERNELS
    assert kinds == {(Tile, False), (SpreadTile, False), (WideTile, False), (WideTile, True)}


@pytest.mark.parametrize("m", [1, 20, 33, 70, 130])
def test_the_op_runs_a_tile_and_a_row_does_not_depend_on_others(
    int8_machine: GemmMachine, monkeypatch: pytest.MonkeyPatch, m: int
) -> None:
    monkeypatch.setattr(int8_tiles, "quantize_int8_rows", quantize_int8)
    monkeypatch.setattr(int8_tiles, "int8_linear", None)
    n, k = 8 * random.randint(20, 70), odd_k()
    weight, bias = Int8Weight(integers(n, k), torch.rand(n, 1) * 0.01), torch.randn(n).to(BF16)
    x = (torch.randn(m, k) * torch.logspace(-3, 3, m).unsqueeze(1)).to(BF16)
    int8_machine.resident = random.randint(1, 9)
    found = int8_tiles.linear(x, weight, bias=bias, out=None)
    assert int8_machine.ran.startswith("sm90_s8_gemm_")
    assert torch.equal(found, int8_linear(x, weight, bias=bias))
    row = random.randrange(m)
    assert torch.equal(int8_tiles.linear(x[row : row + 1], weight, bias=bias, out=None)[0], found[row])


def test_shapes_that_no_tile_takes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_tiles, "quantize_int8_rows", quantize_int8)
    weight, x = Int8Weight(integers(40, 200), torch.rand(40, 1)), torch.randn(5, 200).to(BF16)
    out = torch.empty(5, 40, dtype=BF16)
    refused = tiles.refusal(int8_tiles.tile_for(40, 200, 5), Operands(x.char(), weight.data, out, None, weight.scale))
    assert "K = 200 is not a multiple of 128" in str(refused)
    assert torch.equal(int8_tiles.linear(x, weight, bias=None, out=None), int8_linear(x, weight))


@pytest.mark.parametrize("m", [40, 90, 200])
def test_gate_and_up_with_their_activation(
    int8_machine: GemmMachine, monkeypatch: pytest.MonkeyPatch, m: int
) -> None:
    """One kernel from 65 tokens on where the rule has a tile, two up to 64; then integers once more."""
    monkeypatch.setattr(int8_tiles, "quantize_int8_rows", quantize_int8)
    n, k = 16 * random.randint(20, 50), odd_k()
    of_rule = WideTile(272, True) if m > table.GATED_SMALL else None
    monkeypatch.setattr(table, "rule_gated", lambda fp8, n, k, m: of_rule)
    int8_tiles.gated_tile_for.cache_clear()
    weight = Int8Weight(integers(n, k), torch.rand(n, 1) * 1e-5)
    x = Quantized(integers(m, k), torch.rand(m, 1) * 0.1 + 1e-3)
    try:
        found = int8_tiles.silu_mul(x, weight)
    finally:
        int8_tiles.gated_tile_for.cache_clear()
    assert int8_machine.ran.startswith("sm90_s8_gemm_wide_gated_n288") == (m > 64)
    gate, up = int8_linear(x, weight, out=torch.empty(m, n)).chunk(2, dim=1)
    want = (torch.nn.functional.silu(gate) * up).double()
    assert found.data.dtype == torch.int8
    values = found.data.double() * found.scale.double()
    # Half a step of the integers, and what bf16 rounds before.
    assert ((values - want).abs() <= 0.51 * found.scale + 2.0**-6 * want.abs()).all()
