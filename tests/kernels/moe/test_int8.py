"""Experts in integers of eight bits: what they stand for, and what a reference makes of them."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import integer_experts, mixed, random_experts

from stoker_kernels.moe import ExpertWeights, Routing, experts, quantize_experts, route
from stoker_kernels.moe.int8_layout import int8_values, step_columns

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "group"), [(1, 64), (11, 0), (5, 128)])
def test_the_reference_gives_the_weighted_sum_of_the_numbers(tokens: int, group: int) -> None:
    dense = random_experts(4, 96, 288, torch.float32, CPU, bias=True, seed=tokens)
    weights = quantize_experts(dense, "int8", group)
    assert (weights.experts, weights.ffn, weights.hidden, weights.takes_quantized) == (4, 96, 288, False)
    wide = integer_experts(weights)
    # Within half a step of what was rounded.
    assert 0 < (wide.down - dense.down).abs().max() < dense.down.abs().max() * 2 / 255 * 0.51
    x, found = torch.randn(tokens, 288), route(torch.randn(tokens, 4), Routing(2))
    got = experts(x, found, weights, activation="clamped", limit=0.9)
    expected = mixed(x, found.ids, found.weights, wide, "clamped", 0.9)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_values_are_rounded_once_in_each_step() -> None:
    codes = torch.randint(0, 256, (6, 160), dtype=torch.uint8)
    scale, zero = torch.rand(5, 6).bfloat16(), torch.randint(0, 256, (5, 6)).bfloat16()
    got = int8_values(codes, torch.stack([scale, zero], -1), 32, torch.float32)
    at = torch.arange(160) // 32
    exact = (codes.double() - zero.double().t()[:, at]) * scale.double().t()[:, at]
    assert torch.equal(got.double(), exact)


@pytest.mark.parametrize(("group", "columns", "expected"), [(32, 96, 32), (64, 288, 64), (0, 96, 128), (384, 768, 128)])
def test_a_step_stays_within_a_group(group: int, columns: int, expected: int) -> None:
    assert step_columns(group, columns) == expected


def test_what_does_not_fit_is_refused() -> None:
    dense = random_experts(2, 64, 96, torch.float32, CPU)
    with pytest.raises(ValueError, match="groups of 48 columns are no whole blocks of 32"):
        quantize_experts(dense, "int8", 48)
    good = quantize_experts(dense, "int8", 32)
    with pytest.raises(ValueError, match=r"int8 experts of .*uint8 have scales"):
        ExpertWeights(good.gate_up, good.down, "int8", good.gate_up_scale, good.down_scale, group=64)
