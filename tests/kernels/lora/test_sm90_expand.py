"""The second half of a product with adapters, by the CUDA kernel that the emulator runs on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels import lora
from stoker_kernels.lora import LoraPlan, LoraTarget, mma_expand, reference

SEED = random.randrange(2**30)


def made(
    rng: random.Random, tokens: int, max_rank: int, rows: tuple[int, ...]
) -> tuple[torch.Tensor, LoraTarget, LoraPlan]:
    """y, the adapters of three slots, of which one has no rank here and one few, and a step with some without any."""
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    y = torch.randn((tokens, sum(rows) + 24), generator=generator).to(torch.bfloat16)[:, 8 : 8 + sum(rows)]
    ranks = torch.tensor([max_rank, 0, rng.randrange(1, max_rank + 1)], dtype=torch.int32)
    b = (torch.randn((3, max_rank, sum(rows)), generator=generator) * 0.3).to(torch.bfloat16)
    b[2, int(ranks[2]) :] = torch.nan
    target = LoraTarget(torch.empty((3, max_rank, len(rows), 64)), b, ranks, rows)
    of_token = torch.tensor([rng.randrange(-1, 3) for _ in range(tokens)], dtype=torch.int32)
    of_token[rng.randrange(tokens)] = 0
    plan = LoraPlan.allocate(tokens, 3, of_token.device).of(of_token, 3)
    lora.group_tokens(of_token, 3, plan)
    return y, target, plan


def shrunk(rng: random.Random, target: LoraTarget, plan: LoraPlan, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """s in parts, NaN where nothing may be read, and its sum."""
    _, max_rank, pieces, _ = target.a.shape
    places = len(plan.order)
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    scratch = torch.randn((parts, places, pieces, max_rank), generator=generator)
    owner = plan.adapters.repeat_interleave(lora.TILE)
    for place in range(places):
        rank = int(target.ranks[owner[place]]) if owner[place] >= 0 and plan.order[place] >= 0 else 0
        scratch[:, place, :, rank:] = torch.nan
    return scratch.view(-1), scratch.sum(0).view(-1)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("max_rank", "parts"), [(16, 1), (8, 3), (46, 2)])
@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_what_is_added_matches(
    adapted_machine: GemmMachine, pieces: int, max_rank: int, parts: int, planned: bool
) -> None:
    print("seed", SEED)
    rng = random.Random(f"{SEED} {pieces} {max_rank} {parts}")
    y, target, plan = made(rng, rng.randrange(1, 120), max_rank, tuple(8 * rng.randrange(1, 14) for _ in range(pieces)))
    scratch, whole = shrunk(rng, target, plan, parts)
    assert mma_expand.refusal(y, target, scratch) is None
    want, before = y.clone(), y.clone()
    reference.expand_lora(want, target, plan, whole, 1, False)
    adapted_machine.seed = rng.randrange(99)
    mma_expand.expand_lora(y, target, plan, scratch, parts, planned)
    torch.testing.assert_close(y.float(), want.float(), rtol=2e-2, atol=2e-2)
    untouched = (plan.tokens < 0) | (target.ranks[plan.tokens.clamp(min=0).long()] == 0)
    assert torch.equal(y[untouched], before[untouched])
    assert not torch.equal(y, before)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("max_rank", "parts"), [(16, 1), (22, 2)])
def test_the_activation_matches_for_every_token(
    adapted_machine: GemmMachine, max_rank: int, parts: int, planned: bool
) -> None:
    print("seed", SEED)
    rng = random.Random(f"{SEED} {max_rank} {parts}")
    rows = 8 * rng.randrange(1, 40)
    y, target, plan = made(rng, rng.randrange(1, 150), max_rank, (rows, rows))
    scratch, whole = shrunk(rng, target, plan, parts)
    got, want = (torch.full((len(y), rows), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    reference.expand_silu_mul(y.clone(), target, plan, whole, want, 1, False)
    adapted_machine.x, adapted_machine.seed = y, rng.randrange(99)
    mma_expand.expand_silu_mul(y, target, plan, scratch, got, parts, planned)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_what_the_kernels_do_not_take_is_said() -> None:
    rng = random.Random(SEED)
    y, target, _ = made(rng, 5, 16, (40, 8))
    scratch = torch.empty(64)
    assert mma_expand.refusal(y, target, scratch) is None
    assert "bf16" in str(mma_expand.refusal(y.float(), target, scratch))
    assert "16 bytes" in str(mma_expand.refusal(y[:, 3:], target, scratch))
    odd = LoraTarget(torch.empty((3, 7, 2, 64)), target.b, target.ranks, target.rows)
    assert "two by two" in str(mma_expand.refusal(y, odd, scratch))
