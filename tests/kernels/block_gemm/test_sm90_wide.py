"""The Hopper kernels of GGUF's blocks for many tokens, launched by their own host code and run on the CPU.

In `emulator/`: every value, at random shapes, against what the gguf package decodes, rounded to bf16.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition, random_rows
from tests.kernels.block_gemm.test_planes import in_planes, mild_rows
from tests.kernels.emulator.blocks_wide import WideBlockMachine, compile_blocks_wide

from stoker_kernels.block_gemm import sm90_wide
from stoker_kernels.block_gemm.sm90_wide import Span, WideTile


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_blocks_wide(tmp_path_factory.mktemp("blocks_wide"))


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> WideBlockMachine:
    """Of CTAs that share x in pairs, where a tile allows it."""
    machine = WideBlockMachine(library)
    monkeypatch.setattr(sm90_wide, "SHARES_X", True)
    machine.install(monkeypatch)
    return machine


def product(
    machine: WideBlockMachine, name: str, tile: WideTile, m: int, rows: int, columns: int, split: int = 1
) -> None:
    """Random operands: every value, and nothing around the result is written."""
    data = mild_rows(name, rows, columns)
    piece = in_planes(name, data, columns)
    x_space = torch.randn(m, columns + 8).bfloat16()
    bias = torch.randn(rows).bfloat16() if random.random() < 0.5 else None
    x, out_space = x_space[:, :columns], torch.full((m + 3, rows + 24), float("nan"), dtype=torch.bfloat16)
    values = by_definition(data, name).bfloat16().double()
    want = x.double() @ values.t() + (0.0 if bias is None else bias.double())
    out = out_space[1 : m + 1, 8 : rows + 8]
    machine.x, machine.out, machine.seed = x_space, out_space, random.randrange(1 << 30)
    sm90_wide.linear(x, piece, bias, out, tile=tile, split=split)
    # fp32's sums, and one rounding to bf16.
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2e-4)
    out.fill_(float("nan"))
    assert out_space.isnan().all()


@pytest.mark.matrix("name")
@pytest.mark.parametrize("tile", sm90_wide.TILES, ids=lambda tile: f"{tile.tokens}x{tile.rows}")
@pytest.mark.parametrize("name", sm90_wide.FORMATS)
def test_products_match_the_definition(machine: WideBlockMachine, name: str, tile: WideTile) -> None:
    """Rows and tokens that fill no tile, more tiles than SMs."""
    rows = 4 * random.randrange(tile.rows // 4, tile.rows // 2, 2) + 4
    product(machine, name, tile, random.randint(65, tile.tokens + 40), rows, 256 * random.randint(1, 3))


@pytest.mark.parametrize("split", [sm90_wide.RANGES, 1, 2])
def test_ctas_that_read_x_by_themselves(machine: WideBlockMachine, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_wide, "SHARES_X", False)
    for tile in (tile for tile in sm90_wide.TILES if tile.pairs):
        name, rows = random.choice(sm90_wide.FORMATS), 4 * random.randint(40, 90)
        product(machine, name, tile, random.randint(200, 300), rows, 512, split=split)


def test_clusters_share_the_columns(machine: WideBlockMachine) -> None:
    """CTAs with more half steps than others, or with none of a whole step."""
    for tile in sm90_wide.TILES:
        tokens, rows = random.randint(tile.tokens // 2, tile.tokens), 4 * random.randint(1, 40)
        product(machine, "Q4_K", tile, tokens, rows, 768, split=4)


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("sms", [2, 5, 12])
@pytest.mark.parametrize("tile", sm90_wide.TILES, ids=lambda tile: f"{tile.tokens}x{tile.rows}")
def test_ranges_share_tiles(machine: WideBlockMachine, tile: WideTile, sms: int) -> None:
    """Fewer half steps than CTAs, ranges that are parts of a tile, that begin in one and end in another."""
    machine.sms = sms
    sm90_wide._clusters.cache_clear()
    tokens, rows = random.randint(tile.tokens // 2, 2 * tile.tokens), 4 * random.randint(1, 90)
    product(machine, random.choice(sm90_wide.FORMATS), tile, tokens, rows, 512, split=sm90_wide.RANGES)


def test_the_choice_fills_the_device() -> None:
    """Of 132 SMs: few tiles are shared, and no choice takes more than whole tiles do; ranges up to 128 tokens."""

    def residents(tile: WideTile, split: int) -> int:
        return 132 // tile.cluster(split)

    assert sm90_wide.choice_for(128, 4096, 112, residents)[1] != 1
    assert sm90_wide.choice_for(128, 28672, 32, residents)[1] == sm90_wide.RANGES
    for _ in range(200):
        tokens, rows, halves = random.randint(1, 1024), 4 * random.randint(1, 10000), random.randint(1, 120)
        tile, split = sm90_wide.choice_for(tokens, rows, halves, residents)
        chosen = sm90_wide.cost_us(tile, split, tokens, rows, halves, residents(tile, split))
        assert tokens <= sm90_wide.RANGES_TO or (split >= 1 and not tile.wants_ranges)
        for other in (tile for tile in sm90_wide.TILES if not tile.wants_ranges):
            assert chosen <= sm90_wide.cost_us(other, 1, tokens, rows, halves, residents(other, 1))


@pytest.mark.parametrize("name", sm90_wide.FORMATS)
def test_a_token_of_one_column_brings_out_its_weights(machine: WideBlockMachine, name: str) -> None:
    """Exactly what the gguf package decodes, rounded once."""
    tile = random.choice(sm90_wide.TILES)
    rows, columns = 4 * random.randint(20, 50), 512
    data = random_rows(name, rows, columns)
    at = torch.randperm(columns)[: tile.tokens]
    x = torch.nn.functional.one_hot(at, columns).bfloat16()
    out = torch.empty((len(x), rows), dtype=torch.bfloat16)
    machine.x, machine.out = x, out
    sm90_wide.linear(x, in_planes(name, data, columns), None, out, tile=tile, split=1)
    assert torch.equal(out, by_definition(data, name)[:, at].t().bfloat16())


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("split", [1, 3, sm90_wide.RANGES])
@pytest.mark.parametrize("tile", sm90_wide.TILES, ids=lambda tile: f"{tile.tokens}x{tile.rows}")
def test_gate_and_up_with_their_activation(machine: WideBlockMachine, tile: WideTile, split: int) -> None:
    """Of one piece and of two, by one CTA and by clusters."""
    half, columns, m = 4 * random.randrange(21, 50, 2), 512, random.randint(65, 150)
    data = mild_rows("Q4_K", 2 * half, columns)
    one = in_planes("Q4_K", data, columns)
    two = tuple(in_planes("Q4_K", part, columns) for part in (data[:half], data[half:]))
    x = torch.randn(m, columns).bfloat16()
    gate, up = (x.double() @ by_definition(data, "Q4_K").bfloat16().double().t()).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    for pieces in ((one,), two):
        spans = sm90_wide.gated_spans(pieces)
        assert spans is not None
        space = torch.full((m + 2, half + 8), float("nan"), dtype=torch.bfloat16)
        machine.x, machine.out, machine.seed = x, space, random.randrange(1 << 30)
        out = space[1:-1, 4:-4]
        sm90_wide.silu_mul(x, *spans, out, tile=tile, split=split)
        torch.testing.assert_close(out.double(), want, rtol=2.0**-7, atol=2e-4)
        out.fill_(float("nan"))
        assert space.isnan().all()
    assert sm90_wide.gated_spans((two[0], in_planes("Q6_K", mild_rows("Q6_K", half, columns), columns))) is None
    assert Span(one, half) in (sm90_wide.gated_spans((one,)) or ())
