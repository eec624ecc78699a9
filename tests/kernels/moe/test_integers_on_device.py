"""Experts in integers of four and of eight bits in Triton against plain loops over their numbers."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import integer_experts, mixed, random_experts
from tests.kernels.moe.test_on_device import TOLERANCE, distributed

from stoker_kernels.moe import ExpertKind, Routing, quantize_experts, reference, triton_experts, triton_route

KINDS: tuple[ExpertKind, ...] = ("int4", "int8")


@pytest.mark.matrix("tokens")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "ffn", "hidden", "group", "biased", "dtype"),
    [
        # Widths of a step and a short one, of short ones alone, of one block; groups of a step and of several, which
        # end before a row does, and whole rows.
        (3, 64, 288, 32, False, torch.bfloat16),
        (37, 32, 224, 64, False, torch.float32),
        (4, 160, 320, 128, False, torch.bfloat16),
        (70, 32, 96, 0, True, torch.float16),
        (9, 32, 288, 256, True, torch.bfloat16),
    ],
)
def test_products_are_those_of_the_numbers(
    kind: ExpertKind, tokens: int, ffn: int, hidden: int, group: int, biased: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    dense = random_experts(4, ffn, hidden, dtype, device, bias=biased, seed=tokens)
    weights = quantize_experts(dense, kind, group)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    slots = torch.arange(tokens, device=device)
    slots[1::7] = -1
    logits = distributed(tokens, 2, 4, "any").to(device)
    found = triton_route.route(logits, Routing(2, renormalize=True), slot_mapping=slots)
    got = triton_experts.experts(x, found, weights)
    expected = mixed(x, found.ids, found.weights, integer_experts(weights), "silu", 0.0)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64, 130, 256, 1000, 4096])
def test_products_match_at_real_sizes(kind: ExpertKind, tokens: int, group: int, device: torch.device) -> None:
    """The shape of Qwen3-30B-A3B with fewer experts; twice for equal bits."""
    weights = quantize_experts(random_experts(32, 768, 2048, torch.bfloat16, device), kind, group)
    x = torch.randn(tokens, 2048, device=device).bfloat16()
    found = triton_route.route(torch.randn(tokens, 32, device=device).bfloat16(), Routing(8, renormalize=True))
    got, again = (triton_experts.experts(x, found, weights) for _ in range(2))
    assert torch.equal(got, again)
    exact = reference.experts(x.float(), found, weights)
    assert ((got.float() - exact).norm() / exact.norm()).item() < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_another_type_than_x_are_refused(kind: ExpertKind, device: torch.device) -> None:
    weights = quantize_experts(random_experts(4, 32, 64, torch.float32, device), kind, 32)
    found = triton_route.route(torch.randn(2, 4, device=device), Routing(1))
    with pytest.raises(ValueError, match=r"scales .* are torch.float32, but x is torch.float16"):
        triton_experts.experts(torch.randn(2, 64, device=device).half(), found, weights)
