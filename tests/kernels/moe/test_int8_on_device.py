"""Experts in integers of eight bits in Triton against plain loops over their numbers."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import integer_experts, mixed, random_experts
from tests.kernels.moe.test_on_device import TOLERANCE, distributed

from stoker_kernels.moe import Routing, quantize_experts, reference, triton_experts, triton_route


@pytest.mark.parametrize(
    ("tokens", "ffn", "hidden", "group", "biased", "dtype"),
    [
        # Rows that end within a step, groups of a step and of several, whole rows.
        (3, 64, 288, 32, False, torch.bfloat16),
        (37, 32, 224, 64, False, torch.float32),
        (4, 160, 320, 128, False, torch.bfloat16),
        (70, 32, 96, 0, True, torch.float16),
        (9, 32, 288, 256, True, torch.bfloat16),
    ],
)
def test_products_are_those_of_the_numbers(
    tokens: int, ffn: int, hidden: int, group: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    dense = random_experts(4, ffn, hidden, dtype, device, bias=biased, seed=tokens)
    weights = quantize_experts(dense, "int8", group)
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
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64, 130, 256, 1000, 4096])
def test_products_match_at_real_sizes(tokens: int, group: int, device: torch.device) -> None:
    """The shape of Qwen3-30B-A3B with fewer experts; twice for equal bits."""
    weights = quantize_experts(random_experts(32, 768, 2048, torch.bfloat16, device), "int8", group)
    x = torch.randn(tokens, 2048, device=device).bfloat16()
    found = triton_route.route(torch.randn(tokens, 32, device=device).bfloat16(), Routing(8, renormalize=True))
    got, again = (triton_experts.experts(x, found, weights) for _ in range(2))
    assert torch.equal(got, again)
    exact = reference.experts(x.float(), found, weights)
    assert ((got.float() - exact).norm() / exact.norm()).item() < 8e-3


def test_scales_of_another_type_than_x_are_refused(device: torch.device) -> None:
    weights = quantize_experts(random_experts(4, 32, 64, torch.float32, device), "int8", 32)
    found = triton_route.route(torch.randn(2, 4, device=device), Routing(1))
    with pytest.raises(ValueError, match=r"scales .* are torch.float32, but x is torch.float16"):
        triton_experts.experts(torch.randn(2, 64, device=device).half(), found, weights)


@pytest.mark.parametrize(
    ("tokens", "ffn", "hidden", "dtype"),
    [(3, 64, 288, torch.bfloat16), (37, 40, 104, torch.float32), (70, 24, 96, torch.float16)],
)
def test_integers_on_both_sides_are_those_of_the_reference(
    tokens: int, ffn: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    weights = quantize_experts(random_experts(4, ffn, hidden, dtype, device, seed=tokens), "int8_channel")
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    found = triton_route.route(distributed(tokens, 2, 4, "any").to(device), Routing(2, renormalize=True))
    got = triton_experts.experts(x, found, weights)
    exact = reference.experts(x.float(), found, weights)
    # A value on the edge between two steps may fall on either side; the interpreter cuts bf16 off, three times.
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-2
    assert ((got.float() - exact).norm() / exact.norm()).item() < bound


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 4096])
def test_integers_on_both_sides_match_at_real_sizes(tokens: int, device: torch.device) -> None:
    weights = quantize_experts(random_experts(32, 768, 2048, torch.bfloat16, device), "int8_channel")
    x = torch.randn(tokens, 2048, device=device).bfloat16()
    found = triton_route.route(torch.randn(tokens, 32, device=device).bfloat16(), Routing(8, renormalize=True))
    got, again = (triton_experts.experts(x, found, weights) for _ in range(2))
    assert torch.equal(got, again)
    exact = reference.experts(x.float(), found, weights)
    assert ((got.float() - exact).norm() / exact.norm()).item() < 1e-2
