"""What an expansion of its own reads: clusters of CTAs that shrink, run on the CPU by `emulator/`."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels import lora
from stoker_kernels.lora import LoraPlan, LoraTarget, cluster_shrink, reference


@pytest.mark.parametrize(("max_rank", "planned"), [(16, True), (23, False)])
def test_sums_by_place_match(adapted_machine: GemmMachine, max_rank: int, planned: bool) -> None:
    generator = torch.Generator().manual_seed(max_rank)
    x = torch.randn((70, 1288), generator=generator).to(torch.bfloat16)
    a = (torch.randn((3, max_rank, 2, 1288), generator=generator) * 0.05).to(torch.bfloat16)
    ranks = torch.tensor([max_rank, 0, max_rank - 9], dtype=torch.int32)
    a[2, max_rank - 9 :] = torch.nan
    target = LoraTarget(a, torch.empty((3, max_rank, 48)), ranks, (40, 8))
    tokens = torch.arange(70, dtype=torch.int32) % 4 - 1
    plan = LoraPlan.allocate(70, 3, tokens.device).of(tokens, 3)
    lora.group_tokens(tokens, 3, plan)
    scratch, want = (torch.full((lora.scratch_elements(70, 3, max_rank, 2, 1288),), torch.nan) for _ in range(2))
    reference.shrink_lora(x, target, plan, want, planned=False)
    adapted_machine.x, adapted_machine.out = x, scratch
    assert cluster_shrink.shrink_lora(x, target, plan, scratch, planned) == 1
    got, want = (each[: len(plan.order) * 2 * max_rank].view(-1, 2, max_rank) for each in (scratch, want))
    for slot, rank in enumerate(ranks.tolist()):
        mine = (plan.order >= 0) & (plan.adapters.repeat_interleave(lora.TILE) == slot)
        assert not want[mine][..., :rank].isnan().any()
        torch.testing.assert_close(got[mine][..., :rank], want[mine][..., :rank], rtol=1e-4, atol=1e-4)
