"""Experts in integers of eight bits: what they stand for, and what a reference makes of them."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import integer_experts, mixed, random_experts

from stoker_kernels.moe import ExpertWeights, Routing, experts, quantize_experts, route
from stoker_kernels.moe.layouts.int8 import int8_values, step_columns

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


def test_integers_on_both_sides_are_multiplied_as_defined() -> None:
    """Of each token 127 steps to either side, of each row, too."""
    dense = random_experts(4, 72, 120, torch.float32, CPU, bias=True, seed=5)
    weights = quantize_experts(dense, "int8_channel")
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    up_values = weights.gate_up * weights.gate_up_scale[..., None]
    down_values = weights.down * weights.down_scale[..., None]
    assert 0 < (down_values - dense.down).abs().max() < dense.down.abs().max() / 127 * 0.51
    assert dense.gate_up_bias is not None
    assert dense.down_bias is not None
    x, found = torch.randn(9, 120), route(torch.randn(9, 4), Routing(1))
    got = experts(x, found, weights)
    for token, (expert,) in enumerate(found.ids.tolist()):
        gate, up = (in_steps(x[token]) @ up_values[expert].t() + dense.gate_up_bias[expert]).chunk(2)
        inner = in_steps(torch.nn.functional.silu(gate) * up)
        given = inner @ down_values[expert].t() + dense.down_bias[expert]
        torch.testing.assert_close(got[token], found.weights[token] * given, rtol=2e-2, atol=2e-2)


def in_steps(x: torch.Tensor) -> torch.Tensor:
    """127 of them to either side of zero."""
    step = x.abs().max() / 127
    return (x / step).round() * step


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
