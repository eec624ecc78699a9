"""Experts in NVFP4 as they rest: the numbers of the format's definition, whatever the width, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.moe.oracle import code_at, mixed, nvfp4_experts, nvfp4_numbers, random_experts

from stoker_kernels.moe import ExpertWeights, Routing, experts, pack_nvfp4, quantize_experts, quantize_nvfp4, route
from stoker_kernels.moe.layouts.nvfp4 import unpack_nvfp4
from stoker_kernels.moe.steps import steps_of

CPU = torch.device("cpu")
WIDTHS = sorted({16, 1856, *(16 * random.randrange(1, 60) for _ in range(10))})
SCALES = torch.tensor([bits for bits in range(256) if bits & 127 != 127], dtype=torch.uint8)


def drawn(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes and any scales that are numbers, negative and zero, too, as files have them."""
    blocks = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return blocks, SCALES[torch.randint(0, len(SCALES), (rows, columns // 16))]


@pytest.mark.parametrize("columns", WIDTHS)
def test_what_rests_are_the_numbers_of_the_files(columns: int) -> None:
    rows = random.randrange(1, 9)
    blocks, scales = drawn(rows, columns)
    data, moved = pack_nvfp4(blocks, scales)
    assert torch.equal(unpack_nvfp4(data, moved).double(), nvfp4_numbers(blocks, scales))
    steps = steps_of(columns, 16)
    assert (data.shape, moved.shape) == ((rows, columns // 2), (len(steps), rows, 8))
    assert sum(size for _, size in steps) == columns


def test_bits_are_those_of_bf16_but_for_powers_of_two() -> None:
    """What kernels rely on: masks and shifts make bf16 of a code and of every scale, and their product is exact."""
    scales = torch.cat([SCALES, SCALES[:2]]).view(-1, 8)  # [32, 8]: all there are
    blocks = torch.randint(0, 256, (len(scales), 64), dtype=torch.uint8)
    data, moved = pack_nvfp4(blocks, scales)
    expected = nvfp4_numbers(blocks, scales).view(-1, 8, 16)
    halves = data.view(torch.int16).view(-1, 16, 2)
    for place in range(8):
        code = code_at(halves, place)
        scale = (moved[0, :, place].int() << 4 | 0x7000).to(torch.int16).view(torch.bfloat16)
        product = code * scale[:, None]
        assert product.dtype == torch.bfloat16
        assert torch.equal(product.double() * 2.0**19, expected[:, place])


def test_quantized_are_the_nearest_numbers_of_a_block() -> None:
    matrix = torch.randn(6, 176) * torch.logspace(-6, 6, 6, 2.0)[:, None]
    matrix[2, 32:48] = 0.0
    blocks, scales, factor = quantize_nvfp4(matrix)
    got = nvfp4_numbers(blocks, scales) * factor.double()
    largest = (matrix.view(6, 11, 16).abs().amax(-1) / factor / 6).double()
    size = scales.view(torch.float8_e4m3fn).double()
    # To the nearest e4m3: half a step of its three bits, or of its least.
    assert ((size - largest).abs() <= torch.maximum(largest / 16, torch.tensor(2.0**-10).double())).all()
    assert size.max() == 448
    every = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
    every = torch.cat([every, -every]) * (size * factor.double())[..., None]
    distance = (every[:, :, None] - matrix.view(6, 11, 16, 1).double()).abs().amin(-1)
    torch.testing.assert_close((got - matrix.double()).abs().view(6, 11, 16), distance, rtol=1e-6, atol=1e-9)
    assert not nvfp4_numbers(*quantize_nvfp4(torch.zeros(2, 16))[:2]).any()


@pytest.mark.parametrize(("tokens", "gated"), [(1, True), (11, False)])
def test_the_reference_gives_the_weighted_sum_of_the_numbers(tokens: int, gated: bool) -> None:
    dense = random_experts(4, 80, 304, torch.float32, CPU, bias=True, seed=tokens, gated=gated)
    weights, wide = quantize_experts(dense, "nvfp4"), nvfp4_experts(dense)
    sizes = (weights.experts, weights.ffn, weights.hidden, weights.takes_quantized, weights.gated)
    assert sizes == (4, 80, 304, False, gated)
    x, found = torch.randn(tokens, 304), route(torch.randn(tokens, 4), Routing(2))
    got = experts(x, found, weights, activation="clamped" if gated else "relu2", limit=0.9)
    expected = mixed(x, found.ids, found.weights, wide, "clamped" if gated else "relu2", 0.9)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    blocks, scales = drawn(2, 64)
    scales[1, 1] = 0xFF
    with pytest.raises(ValueError, match="has a scale that is no number"):
        pack_nvfp4(blocks, scales)
    good = quantize_experts(random_experts(2, 48, 80, torch.float32, CPU), "nvfp4")
    assert good.down_factor is not None
    parts = (good.gate_up, good.down, "nvfp4", good.gate_up_scale, good.down_scale)
    with pytest.raises(ValueError, match="nvfp4 experts have factors"):
        ExpertWeights(*parts, gate_up_factor=good.gate_up_factor, down_factor=good.down_factor[:, 1:])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nvfp4 experts have factors"):
        ExpertWeights(*parts)  # type: ignore[arg-type]
    x, found = torch.randn(3, 80), route(torch.randn(3, 2), Routing(1))
    with pytest.raises(ValueError, match="experts with a gate have no activation 'relu2'"):
        experts(x, found, good, activation="relu2")
