"""The Hopper kernels of GGUF's blocks for few tokens, launched by their own host code and run on the CPU.

In `emulator/`: every value, at random shapes, against what the gguf package decodes.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition, random_rows
from tests.kernels.block_gemm.test_planes import in_planes, mild_rows
from tests.kernels.emulator.blocks import BlockMachine

from stoker_kernels.block_gemm import sm90_few
from stoker_kernels.block_gemm.sm90_few import FewTile
from stoker_kernels.quant import PLANE_KINDS


def product(machine: BlockMachine, name: str, m: int, rows: int, columns: int, split: int = 0) -> None:
    """Random operands: every value, and nothing around the result is written."""
    data = mild_rows(name, rows, columns)
    piece = in_planes(name, data, columns)
    x_space = torch.randn(m, columns + 8).bfloat16()
    bias = torch.randn(rows).bfloat16() if random.random() < 0.5 else None
    x, out_space = x_space[:, :columns], torch.full((m + 3, rows + 24), float("nan"), dtype=torch.bfloat16)
    want = x.double() @ by_definition(data, name).double().t() + (0.0 if bias is None else bias.double())
    out = out_space[1 : m + 1, 8 : rows + 8]
    machine.x, machine.out, machine.seed = x_space, out_space, random.randrange(1 << 30)
    sm90_few.linear(x, piece, bias, out, split=split)
    # fp32's sums, and one rounding to bf16.
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2e-4)
    out.fill_(float("nan"))
    assert out_space.isnan().all()


@pytest.mark.matrix("name")
@pytest.mark.parametrize("tile", sm90_few.TILES, ids=lambda tile: str(tile.tokens))
@pytest.mark.parametrize("name", sm90_few.FORMATS)
def test_products_match_the_definition(machine: BlockMachine, name: str, tile: FewTile) -> None:
    """Fewer steps than warps, and as many as a CTA keeps and more."""
    for steps in (random.randint(1, 7), random.randint(14, 20)):
        tokens = random.randint(tile.tokens // 2 + 1, tile.tokens)
        product(machine, name, tokens, 16 * random.randint(1, 9), 256 * steps)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_clusters_add_up_chunks_of_tiles(machine: BlockMachine, name: str) -> None:
    """CTAs with fewer steps than others, or none; more tiles than a chunk."""
    machine.sms = 2
    product(machine, name, random.randint(1, 16), 16 * random.randint(33, 40), 256 * random.randint(5, 10), split=4)
    product(machine, name, random.randint(17, 32), 16 * random.randint(1, 5), 256 * 9, split=8)


def test_the_columns_are_shared_where_that_is_faster() -> None:
    """Of 132 SMs: one CTA has all columns unless x does not fit."""
    few, _, many = sm90_few.TILES
    assert sm90_few.split_for(few, "Q4_K", 28672, 16, lambda split: 264 // split) == 1
    assert sm90_few.split_for(few, "Q6_K", 4096, 56, lambda split: 264 // split) in (4, 7)
    for _ in range(200):
        rows, steps = 16 * random.randint(1, 3000), random.randint(1, 56)
        tile, name = random.choice([few, many]), random.choice(sm90_few.FORMATS)
        split = sm90_few.split_for(tile, name, rows, steps, lambda split: 132 // split)
        shared, depth = tile.room(name, -(-steps // split))
        assert depth >= 1
        assert shared * tile.ctas <= 227 * 1024
    with pytest.raises(ValueError, match="rows of 33024 columns"):
        sm90_few.split_for(few, "Q4_K", 1024, 129, lambda split: 132 // split)


def test_long_rows_take_a_kernel_of_fewer_tokens() -> None:
    assert sm90_few.tile_for("Q8_0", 30, 4096).tokens == 32
    assert sm90_few.tile_for("Q8_0", 30, 28672).tokens == 8
    assert sm90_few.tile_for("Q8_0", 12, 14336).tokens == 16


@pytest.mark.parametrize("name", sm90_few.FORMATS)
def test_a_token_of_one_column_brings_out_its_weights(machine: BlockMachine, name: str) -> None:
    """Exactly what the gguf package decodes, rounded once."""
    for tokens in (random.randint(1, 16), random.randint(17, 32)):
        rows, columns = 16 * random.randint(1, 4), 256 * random.randint(1, 3)
        data = random_rows(name, rows, columns)
        at = torch.randint(0, columns, (tokens,))
        x = torch.nn.functional.one_hot(at, columns).bfloat16()
        out = torch.empty((tokens, rows), dtype=torch.bfloat16)
        machine.x, machine.out = x, out
        sm90_few.linear(x, in_planes(name, data, columns), None, out)
        assert torch.equal(out, by_definition(data, name)[:, at].t().bfloat16())


def test_more_tokens_take_several_launches(machine: BlockMachine) -> None:
    product(machine, "Q4_K", random.randint(33, 64), 32, 512)


def test_one_large_x_among_small_ones(machine: BlockMachine) -> None:
    """Sums of places are two bf16 numbers: what they lose is far below what bf16 shows."""
    data = mild_rows("Q4_K", 32, 1024)
    x = torch.randn(4, 1024).bfloat16()
    x[:, 300] = 3000.0
    out = torch.empty((4, 32), dtype=torch.bfloat16)
    machine.x, machine.out = x, out
    sm90_few.linear(x, in_planes("Q4_K", data, 1024), None, out)
    want = x.double() @ by_definition(data, "Q4_K").double().t()
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2e-3)


@pytest.mark.parametrize("name", sm90_few.FORMATS)
def test_a_ring_leaves_room_for_the_next_launch(name: str) -> None:
    kind = PLANE_KINDS[name]
    assert sm90_few.unit_bytes(name) == 16 * (32 * (kind.low + kind.high) + 8 * kind.scale_words + 4 * kind.bytes_)
    for tile in (each for each in sm90_few.TILES if each.slices):
        sums = 4 * tile.tokens * (2 * 8 * 20 + tile.chunk * 16)
        shared, depth = tile.room(name, random.randint(1, 8 * tile.slices))
        assert shared - sums == depth * 8 * sm90_few.unit_bytes(name)
        assert depth >= 2
        assert shared * 2 <= 227 * 1024


def test_what_is_not_taken_is_named() -> None:
    piece, x = in_planes("Q3_K", mild_rows("Q3_K", 32, 512), 512), torch.zeros((2, 512), dtype=torch.bfloat16)
    out = torch.empty((2, 32), dtype=torch.bfloat16)
    assert "not Q3_K" in str(sm90_few.refusal(x, piece, None, out))
    fits = in_planes("Q4_K", mild_rows("Q4_K", 32, 512), 512)
    assert "up to 64 tokens" in str(sm90_few.refusal(x[:1].expand(65, 512), fits, None, out))
    assert "bfloat16" in str(sm90_few.refusal(x.half(), fits, None, out))
    odd = in_planes("Q4_K", mild_rows("Q4_K", 24, 512), 512)
    assert "multiples of 16 rows" in str(sm90_few.refusal(x, odd, None, out[:, :24]))
