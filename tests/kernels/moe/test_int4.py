"""Experts in integers of four bits: how their codes rest, what they stand for, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.moe.oracle import int4_code, integer_experts, mixed, random_experts

from stoker_kernels.moe import ExpertWeights, Routing, experts, pack_int4, quantize_experts, route
from stoker_kernels.moe.layouts.int4 import int4_values, unpack_int4

CPU = torch.device("cpu")
WIDTHS = sorted({32, 1408, *(32 * random.randrange(1, 40) for _ in range(8))})


@pytest.mark.parametrize("columns", WIDTHS)
def test_codes_rest_where_the_layout_says(columns: int) -> None:
    rows = random.randrange(1, 7)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    data = pack_int4(codes)
    assert data.shape == (rows, columns // 2)
    assert torch.equal(unpack_int4(data), codes)
    for _ in range(60):
        row, column = random.randrange(rows), random.randrange(columns)
        assert int4_code(data[row].tolist(), column) == int(codes[row, column])


def test_codes_beside_the_bits_of_128_are_bf16_and_of_1024_fp16() -> None:
    """What kernels rely on: nothing is converted, and the difference to a zero point is exact."""
    codes = torch.arange(16, dtype=torch.int16)
    for dtype, bits, base in ((torch.bfloat16, 0x4300, 128), (torch.float16, 0x6400, 1024)):
        found = (codes | bits).view(dtype)
        for zero in range(17):
            assert torch.equal((found - torch.tensor(base + zero, dtype=dtype)).int(), codes.int() - zero)


@pytest.mark.parametrize(("tokens", "group"), [(1, 64), (11, 0), (5, 128)])
def test_the_reference_gives_the_weighted_sum_of_the_numbers(tokens: int, group: int) -> None:
    dense = random_experts(4, 96, 288, torch.float32, CPU, bias=True, seed=tokens)
    weights = quantize_experts(dense, "int4", group)
    assert (weights.experts, weights.ffn, weights.hidden, weights.takes_quantized) == (4, 96, 288, False)
    wide = integer_experts(weights)
    # Within half a step of what was rounded, a fifteenth of a group's range.
    assert (wide.down - dense.down).abs().max() < dense.down.abs().max() * 2 / 15 * 0.51
    x, found = torch.randn(tokens, 288), route(torch.randn(tokens, 4), Routing(2))
    got = experts(x, found, weights, activation="clamped", limit=0.9)
    expected = mixed(x, found.ids, found.weights, wide, "clamped", 0.9)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_values_are_rounded_once_in_each_step() -> None:
    """As `integer_linear` has them: the difference is exact, the product rounded to the model's type."""
    codes, group = torch.randint(0, 16, (6, 160), dtype=torch.uint8), 32
    scale = torch.rand(5, 6, 1).bfloat16()
    zero = torch.randint(0, 17, (5, 6, 1)).bfloat16()
    got = int4_values(pack_int4(codes), torch.cat([scale, zero], -1), group, torch.bfloat16)
    at = torch.arange(160) // group
    exact = (codes.double() - zero[..., 0].double().t()[:, at]) * scale[..., 0].double().t()[:, at]
    assert torch.equal(got, exact.bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    dense = random_experts(2, 64, 96, torch.float32, CPU)
    with pytest.raises(ValueError, match="groups of 48 columns are no whole blocks of 32"):
        quantize_experts(dense, "int4", 48)
    with pytest.raises(ValueError, match="40 columns are no whole blocks of 32"):
        pack_int4(torch.zeros(2, 40, dtype=torch.uint8))
    good = quantize_experts(dense, "int4", 32)
    with pytest.raises(ValueError, match=r"int4 experts of .*uint8 have scales"):
        ExpertWeights(good.gate_up, good.down, "int4", good.gate_up_scale, good.down_scale, group=64)
