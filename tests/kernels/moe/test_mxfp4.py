"""Experts in MXFP4 as they rest: the numbers of the format's definition, whatever the width, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.moe.oracle import code_at, mixed, mxfp4_numbers, random_experts

from stoker_kernels.moe import ExpertWeights, Routing, experts, pack_mxfp4, quantize_experts, quantize_mxfp4, route
from stoker_kernels.moe.layouts.mxfp4 import scale_bytes, unpack_mxfp4
from stoker_kernels.moe.steps import steps_of

CPU = torch.device("cpu")
WIDTHS = sorted({32, 2880, *(32 * random.randrange(1, 40) for _ in range(12))})


def drawn(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes and any scales that are taken, as files have them."""
    blocks = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return blocks, torch.randint(27, 161, (rows, columns // 32), dtype=torch.uint8)


@pytest.mark.parametrize("columns", WIDTHS)
def test_what_rests_are_the_numbers_of_the_files(columns: int) -> None:
    rows = random.randrange(1, 9)
    blocks, scales = drawn(rows, columns)
    data, moved = pack_mxfp4(blocks, scales)
    expected = mxfp4_numbers(blocks, scales)
    assert torch.equal(unpack_mxfp4(data, moved).double(), expected)
    assert (data.numel(), moved.numel()) == (rows * columns // 2, scale_bytes(rows, columns))
    assert sum(size for _, size in steps_of(columns)) == columns


def test_bits_are_those_of_bf16_but_for_powers_of_two() -> None:
    """What kernels rely on: a mask and a shift make bf16 of a code place, exactly."""
    blocks, scales = drawn(3, 256)
    data, moved = pack_mxfp4(blocks, scales)
    expected = mxfp4_numbers(blocks, scales).view(3, 8, 32)
    halves = data.view(torch.int16).view(3, 32, 2)
    for place in range(8):
        code = code_at(halves, place)
        scale = (moved[0, :, place].int() << 7).to(torch.int16).view(torch.bfloat16)
        product = code * scale[:, None]
        assert product.dtype == torch.bfloat16
        assert torch.equal(product.double() * 2.0**32, expected[:, place])


def test_quantized_are_the_nearest_numbers_of_a_block() -> None:
    matrix = torch.randn(6, 160) * torch.logspace(-9, 9, 6, 2.0)[:, None]
    matrix[2, 32:64] = 0.0
    blocks, scales = quantize_mxfp4(matrix)
    got = mxfp4_numbers(blocks, scales)
    largest = matrix.view(6, 5, 32).abs().amax(-1)
    power = torch.pow(2.0, scales.float() - 127)
    assert ((largest == 0) | ((largest / power >= 4) & (largest / power < 8))).all()
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    every = torch.cat([sizes, -sizes]).double() * power.double()[..., None]
    distance = (every[:, :, None] - matrix.view(6, 5, 32, 1).double()).abs().amin(-1)
    assert torch.equal((got - matrix.double()).abs().view(6, 5, 32), distance)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, *[4.0] * 24]])
    assert mxfp4_numbers(*quantize_mxfp4(ties))[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0]


@pytest.mark.parametrize("tokens", [1, 11])
def test_the_reference_gives_the_weighted_sum_of_the_numbers(tokens: int) -> None:
    dense = random_experts(4, 96, 288, torch.float32, CPU, bias=True, seed=tokens)
    weights = quantize_experts(dense, "mxfp4")
    assert (weights.experts, weights.ffn, weights.hidden, weights.takes_quantized) == (4, 96, 288, False)
    wide = ExpertWeights(
        torch.stack([mxfp4_numbers(*quantize_mxfp4(each)) for each in dense.gate_up]).float(),
        torch.stack([mxfp4_numbers(*quantize_mxfp4(each)) for each in dense.down]).float(),
        gate_up_bias=dense.gate_up_bias, down_bias=dense.down_bias,
    )  # fmt: skip
    x, found = torch.randn(tokens, 288), route(torch.randn(tokens, 4), Routing(2))
    got = experts(x, found, weights, activation="clamped", limit=0.9)
    expected = mixed(x, found.ids, found.weights, wide, "clamped", 0.9)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="48 columns are no whole blocks of 32"):
        steps_of(48)
    blocks, scales = drawn(2, 64)
    scales[1, 1] = 255
    with pytest.raises(ValueError, match=r"a scale of 2\^128; the largest that is multiplied is 2\^33"):
        pack_mxfp4(blocks, scales)
    good = quantize_experts(random_experts(2, 32, 64, torch.float32, CPU), "mxfp4")
    assert good.gate_up_scale is not None
    with pytest.raises(ValueError, match=r"mxfp4 experts of .*uint8 have scales"):
        ExpertWeights(good.gate_up, good.down, "mxfp4", good.gate_up_scale[:, :, 1:], good.down_scale)
    with pytest.raises(ValueError, match=r"mxfp4 experts of .*int8 have scales"):
        ExpertWeights(good.gate_up.view(torch.int8), good.down, "mxfp4", good.gate_up_scale, good.down_scale)
