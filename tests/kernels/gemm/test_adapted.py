"""Products with adapters: what they are on a CPU, and which operands go to the kernels of two launches."""

from __future__ import annotations

from dataclasses import replace

import torch

from stoker_kernels import lora
from stoker_kernels.gemm import adapted, adapted_linear, adapted_silu_mul
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.integer_gemm import store_integers
from stoker_kernels.lora import LoraPlan, LoraStep, LoraTarget
from stoker_kernels.quant import IntegerWeight, LinearWeight


def made(
    tokens: list[int], rows: tuple[int, ...], columns: int, *, slots: int = 3, rank: int = 7,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, LinearWeight, LoraTarget, LoraStep]:  # fmt: skip
    generator = torch.Generator().manual_seed(len(tokens) + columns)
    of_token = torch.tensor(tokens, dtype=torch.int32)
    plan = LoraPlan.allocate(len(tokens), slots, of_token.device).of(of_token, slots)
    lora.group_tokens(of_token, slots, plan)
    room = lora.scratch_elements(len(tokens), slots, rank, len(rows), columns)
    a = torch.randn((slots, rank, len(rows), columns), generator=generator)
    b = torch.randn((slots, rank, sum(rows)), generator=generator)
    ranks = torch.tensor([rank, 0, rank - 3][:slots], dtype=torch.int32)
    x, weight = (torch.randn((n, columns), generator=generator).to(dtype) for n in (len(tokens), sum(rows)))
    target = LoraTarget(a.to(dtype), b.to(dtype), ranks, rows)
    return x, LinearWeight(weight), target, LoraStep(plan, torch.empty(room))


def definition(x: torch.Tensor, weight: LinearWeight, target: LoraTarget, tokens: list[int]) -> torch.Tensor:
    y = x.double() @ weight.data.double().T
    for token, slot in enumerate(tokens):
        if slot >= 0 and (rank := int(target.ranks[slot])) > 0:
            first = 0
            for piece, rows in enumerate(target.rows):
                shrunk = target.a[slot, :rank, piece].double() @ x[token].double()
                y[token, first : first + rows] += shrunk @ target.b[slot, :rank, first : first + rows].double()
                first += rows
    return y


def test_a_product_with_adapters_is_its_definition() -> None:
    tokens = [2, -1, 0, 1, 2]
    x, weight, target, step = made(tokens, (40, 9), 33)
    bias, out = torch.randn(49), torch.empty((5, 49))
    got = adapted_linear(x, weight, target, step, bias=bias, out=out)
    assert got is out
    torch.testing.assert_close(got.double(), definition(x, weight, target, tokens) + bias, rtol=1e-4, atol=1e-4)


def test_adapters_change_gate_and_up_before_the_activation() -> None:
    tokens = [0, 2, -1]
    x, weight, target, step = made(tokens, (24, 24), 40)
    gate, up = definition(x, weight, target, tokens).chunk(2, dim=1)
    got = adapted_silu_mul(x, weight, target, step)
    torch.testing.assert_close(got.double(), gate * torch.sigmoid(gate) * up, rtol=1e-4, atol=1e-3)


def test_adapters_change_integers_whose_gate_and_up_are_stored_in_turn() -> None:
    tokens = [1, 0, 2, -1, 2]
    x, _, target, step = made(tokens, (96, 96), 128)
    codes = torch.randint(0, 16, (192, 128), dtype=torch.uint8)
    empty, scale = torch.empty((192, 64), dtype=torch.uint8), torch.rand((2, 192)) * 0.1
    pairs = IntegerWeight(empty, torch.empty_like(scale), None, 4, 64, layout="pairs")
    store_integers(pairs, 0, codes, scale, None)
    values = LinearWeight((codes.float() - 8) * scale.repeat_interleave(64, 0).t())
    gate, up = definition(x, values, target, tokens).chunk(2, dim=1)
    got = adapted_silu_mul(x, pairs, target, step)
    torch.testing.assert_close(got.double(), gate * torch.sigmoid(gate) * up, rtol=1e-4, atol=1e-3)


TILE = Tile("cluster", 64, 1, 64, 4)


def refused(
    rows: tuple[int, ...], *, tokens: int = 5, slots: int = 3, rank: int = 7, columns: int = 64, tile: Tile = TILE
) -> str | None:
    x, weight, target, step = made([0] * tokens, rows, columns, slots=slots, rank=rank, dtype=torch.bfloat16)
    # As a slab has them: the lines of a slot are as far apart as alignment has it.
    target = replace(target, b=torch.nn.functional.pad(target.b, (0, -sum(rows) % 16))[..., : sum(rows)])
    return adapted.refusal(tile, Operands(x, weight.data, torch.empty((tokens, sum(rows)))), target, step)


def test_two_launches_take_pieces_of_eights_and_as_many_adapters_as_a_warp_lists() -> None:
    assert refused((72, 8)) is None
    assert "multiples of 8" in str(refused((70, 10)))
    assert refused((64,), tokens=40, slots=5, rank=48) is None  # 15 pairs
    assert "too many" in str(refused((64,), tokens=40, slots=5, rank=49))
    few = Tile("cluster", 64, 1, 8, 4)
    assert refused((64,), tokens=2, slots=10, rank=256, tile=few) is None  # two adapters at most
    assert "too many" in str(refused((64,), tokens=3, slots=10, rank=256, tile=few))
    assert "too many" in str(refused((64,), tokens=64, slots=29, rank=8))  # 33 tiles
    assert "multiples of 16 bytes" in str(refused((64,), columns=60))


def test_two_launches_take_what_has_room_beside_two_stages() -> None:
    # A·x of 64 tokens, three pieces and 128 ranks is 48 KiB.
    assert refused((64, 64, 64), tokens=2, slots=2, rank=128) is None
    tile = Tile("cluster", 128, 1, 64, 3)
    assert "no room" in str(refused((64, 64, 64), tokens=2, slots=2, rank=128, tile=tile))


def test_two_launches_take_no_large_tiles_of_tokens() -> None:
    assert "64 tokens" in str(refused((64,), tile=Tile("multicast", 64, 1, 128, 2, share=2, cluster=2)))
