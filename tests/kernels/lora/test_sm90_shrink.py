"""What an expansion of its own reads: clusters of CTAs that shrink, run on the CPU by `emulator/`."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels import lora
from stoker_kernels.lora import LoraPlan, LoraTarget, cluster_shrink, reference
from stoker_kernels.quant import FP8, Quantized

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.int8], ids=str)


@TYPES
@pytest.mark.parametrize(("max_rank", "planned"), [(16, True), (23, False)])
def test_sums_by_place_match(
    adapted_machine: GemmMachine, max_rank: int, planned: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(max_rank)
    drawn = torch.randn((70, 1288), generator=generator) * torch.rand((70, 1), generator=generator).exp()
    x = drawn.to(dtype) if dtype == torch.bfloat16 else Quantized.of(drawn, dtype)
    a = (torch.randn((3, max_rank, 2, 1288), generator=generator) * 0.05).to(torch.bfloat16)
    ranks = torch.tensor([max_rank, 0, max_rank - 9], dtype=torch.int32)
    a[2, max_rank - 9 :] = torch.nan
    target = LoraTarget(a, torch.empty((3, max_rank, 48)), ranks, (40, 8))
    tokens = torch.arange(70, dtype=torch.int32) % 4 - 1
    plan = LoraPlan.allocate(70, 3, tokens.device).of(tokens, 3)
    lora.group_tokens(tokens, 3, plan)
    scratch, want = (torch.full((lora.scratch_elements(70, 3, max_rank, 2, 1288),), torch.nan) for _ in range(2))
    reference.shrink_lora(x, target, plan, want, planned=False)
    adapted_machine.x, adapted_machine.out = x.data if isinstance(x, Quantized) else x, scratch
    assert cluster_shrink.shrink_lora(x, target, plan, scratch, planned) == 1
    got, want = (each[: len(plan.order) * 2 * max_rank].view(-1, 2, max_rank) for each in (scratch, want))
    for slot, rank in enumerate(ranks.tolist()):
        mine = (plan.order >= 0) & (plan.adapters.repeat_interleave(lora.TILE) == slot)
        assert not want[mine][..., :rank].isnan().any()
        torch.testing.assert_close(got[mine][..., :rank], want[mine][..., :rank], rtol=1e-4, atol=1e-4)


def test_every_number_of_eight_bits_is_widened_exactly(adapted_machine: GemmMachine) -> None:
    for dtype in (FP8, torch.int8):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        if dtype == FP8:
            every = torch.where(every.float().isnan(), torch.zeros(256).to(FP8).float(), every.float()).to(FP8)
        # A column a rank: the sum of a rank is one number of x.
        x = Quantized(every.view(16, 16).contiguous(), torch.arange(1.0, 17.0))
        a = torch.eye(16, dtype=torch.bfloat16).view(1, 16, 1, 16)
        target = LoraTarget(a, torch.empty((1, 16, 8)), torch.tensor([16], dtype=torch.int32), (8,))
        tokens = torch.zeros(16, dtype=torch.int32)
        plan = LoraPlan.allocate(16, 1, tokens.device).of(tokens, 1)
        lora.group_tokens(tokens, 1, plan)
        scratch = torch.full((lora.scratch_elements(16, 1, 16, 1, 16),), torch.nan)
        adapted_machine.x, adapted_machine.out = x.data, scratch
        assert cluster_shrink.shrink_lora(x, target, plan, scratch, False) == 1
        assert torch.equal(scratch[:256].view(16, 16), x.data.float() * x.scale[:, None])
