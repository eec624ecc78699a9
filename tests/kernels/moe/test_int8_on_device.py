"""Experts in INT8 whose activations are rounded to INT8, in Triton, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from tests.kernels.moe.test_on_device import distributed

from stoker_kernels.moe import Routing, quantize_experts, reference, triton_experts, triton_route


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
