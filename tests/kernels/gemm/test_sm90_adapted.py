"""Products with adapters in two launches, run on the CPU by `emulator/`: mixed ranks, tokens without one, NaN."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels import lora
from stoker_kernels.gemm import adapted, small
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.lora import LoraPlan, LoraStep, LoraTarget

BF16 = torch.bfloat16


def target_of(generator: torch.Generator, slots: int, max_rank: int, columns: int, rows: tuple[int, ...]) -> LoraTarget:
    """Matrices in a slab like the executor's, NaN wherever no adapter has a rank; slot 1 makes NaN of its tokens."""
    pieces, line = len(rows), len(rows) * columns + -(-sum(rows) // 16) * 16
    slab = torch.randn((slots, max_rank, line), generator=generator) * 0.05
    ranks = torch.randint(0, max_rank + 1, (slots,), generator=generator, dtype=torch.int32)
    ranks[0] = max_rank
    for slot, rank in enumerate(ranks.tolist()):
        slab[slot, rank:] = torch.nan
    if slots > 1 and ranks[1] > 0:
        slab[1, 0, : pieces * columns] = torch.nan
    slab = slab.to(BF16)
    a = slab[:, :, : pieces * columns].view(slots, max_rank, pieces, columns)
    return LoraTarget(a, slab[:, :, pieces * columns :][..., : sum(rows)], ranks, rows)


def step_of(tokens: torch.Tensor, target: LoraTarget, planned: bool) -> LoraStep:
    slots, max_rank, pieces, columns = target.a.shape
    plan = LoraPlan.allocate(len(tokens), slots, tokens.device).of(tokens, slots)
    lora.group_tokens(tokens, slots, plan)
    room = lora.scratch_elements(len(tokens), slots, max_rank, pieces, columns)
    return LoraStep(plan, torch.full((room,), torch.nan), planned)


def run(
    machine: GemmMachine, tile: Tile, m: int, k: int, rows: tuple[int, ...], slots: int, max_rank: int, seed: int = 0
) -> torch.Tensor:
    """Run both launches on random operands, and compare with the definition; returns the result."""
    generator, rng = torch.Generator().manual_seed(m * k + seed), random.Random(m * k + max_rank + seed)
    x = torch.randn((m, k), generator=generator).to(BF16)
    n = sum(rows)
    weight = (torch.randn((n, k), generator=generator) * k**-0.5).to(BF16)
    bias = None if tile.gated else torch.randn((n,), generator=generator).to(BF16)
    target = target_of(generator, slots, max_rank, k, rows)
    tokens = torch.randint(-1, slots, (m,), generator=generator, dtype=torch.int32)
    tokens[0] = 0
    words = torch.zeros(lora.WORDS, dtype=torch.int32) if rng.random() < 0.7 else None
    target = replace(target, words=words)
    step = step_of(tokens, target, planned=rng.random() < 0.7)
    step.plan.turn.fill_(rng.randrange(1, 2**31))
    out = torch.full((m, n // 2 if tile.gated else n), torch.nan, dtype=BF16)
    operands = Operands(x, weight, out, bias)
    assert small.refusal(tile, operands) is None
    assert adapted.refusal(tile, operands, target, step) is None
    machine.x, machine.out, machine.words = x, step.scratch, lora.words_of(target, step)
    adapted.run(tile, operands, target, step)
    assert machine.ran.startswith(f"sm90_bf16_gemm_{'gated' if tile.gated else tile.family}_adapted")
    want = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    scratch = torch.empty(lora.scratch_elements(m, slots, max_rank, len(rows), k))
    lora.shrink_lora(x, target, step.plan, scratch, planned=False)
    lora.expand_lora(want, target, step.plan, scratch.to(BF16).float(), parts=1, planned=False)
    if tile.gated:
        gate, up = want.chunk(2, dim=1)
        want = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(out.float(), want, rtol=2.0**-7, atol=4e-3, equal_nan=True)
    assert not out[(tokens != 1) | (slots == 1)].isnan().any()
    if machine.words is not None:
        assert machine.words.tolist() == [*[int(step.plan.turn)] * 2, 0, 0]
    return out


@pytest.mark.parametrize(("size", "chunks", "cluster"), [(64, 1, 1), (64, 2, 2), (128, 1, 4), (128, 2, 3)])
def test_plain_products_match(adapted_machine: GemmMachine, size: int, chunks: int, cluster: int) -> None:
    # Pieces that end within a group of rows, and within a warp's.
    tile = Tile("cluster", size, chunks, 8, 3, 1, cluster)
    run(adapted_machine, tile, 8, 448, (200, 24, 88), slots=8, max_rank=16)
    run(adapted_machine, tile, 7, 512, (136, 40), slots=4, max_rank=23)
    run(adapted_machine, tile, 1, 512, (72,), slots=2, max_rank=5)
    run(adapted_machine, tile, 2, 512, (200,), slots=3, max_rank=61)


@pytest.mark.parametrize(("size", "chunks", "cluster"), [(64, 1, 2), (64, 2, 1), (128, 1, 2)])
def test_gated_products_match(adapted_machine: GemmMachine, size: int, chunks: int, cluster: int) -> None:
    tile = Tile("cluster", size, chunks, 8, 3, 1, cluster, gated=True)
    run(adapted_machine, tile, 6, 576, (264, 264), slots=5, max_rank=16)
    run(adapted_machine, tile, 3, 576, (264, 264), slots=6, max_rank=24)


@pytest.mark.parametrize(
    ("size", "chunks", "tokens", "cluster", "gated"),
    [(64, 2, 16, 3, False), (128, 1, 64, 2, False), (64, 1, 32, 2, True), (128, 1, 64, 1, True)],
)
def test_blocks_of_tokens_match(
    adapted_machine: GemmMachine, size: int, chunks: int, tokens: int, cluster: int, gated: bool
) -> None:
    # More pairs than a stage holds, of adapters whose ranks are no sixteens.
    tile = Tile("cluster", size, chunks, tokens, 2, 1, cluster, gated=gated)
    rows = (152, 152) if gated else (72, 56, 128)
    run(adapted_machine, tile, tokens - 5, 448, rows, slots=8, max_rank=16)
    run(adapted_machine, tile, tokens // 2 + 3, 576, rows, slots=5, max_rank=39)


@pytest.mark.parametrize(("size", "share", "split"), [(128, 1, 3), (64, 2, 2), (64, 4, 1)])
def test_parts_of_k_share_the_pairs(adapted_machine: GemmMachine, size: int, share: int, split: int) -> None:
    tile = Tile("multicast", size, 1, 64, 3, 1, share * split, share=share)
    run(adapted_machine, tile, 64, 448, (136, 56), slots=8, max_rank=16)
    run(adapted_machine, tile, 37, 512, (264,), slots=5, max_rank=40)


def test_a_wide_input_is_shrunk_in_rounds(adapted_machine: GemmMachine) -> None:
    # Of the columns that warps hold at once, 20,480 in all, and some that none holds.
    run(adapted_machine, Tile("cluster", 64, 1, 8, 3, 1, 1), 3, 20992, (16,), slots=2, max_rank=16)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_changes_a_bit(adapted_machine: GemmMachine, seed: int) -> None:
    tile = Tile("cluster", 64, 2, 8, 3, 1, 2)
    plain = run(adapted_machine, tile, 7, 960, (320,), slots=2, max_rank=60, seed=9)
    adapted_machine.seed = seed + 1
    again = run(adapted_machine, tile, 7, 960, (320,), slots=2, max_rank=60, seed=9)
    assert torch.equal(again.view(torch.int16), plain.view(torch.int16))
