"""Integer weights: packing, rows of any layout, the reference."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from stoker_kernels.fragment_gemm import from_fragments
from stoker_kernels.gemm import linear_silu_mul
from stoker_kernels.integer_gemm import dequantize_integers, integer_linear, store_integers
from stoker_kernels.quant import IntegerWeight, integer_scale_shape, pack_rows, unpack_rows


def random_weight(
    n: int, k: int, bits: int, group: int, *, zeros: bool = True, order: bool = False
) -> tuple[IntegerWeight, torch.Tensor]:
    """A weight in rows and its value in fp64, by the definition."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    shape = integer_scale_shape(n, k, group)
    scale = torch.rand(shape) * 0.02 + 0.001
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if zeros else None
    value = torch.empty(n, k, dtype=torch.float64)
    for column in range(k):
        shift = 1 << (bits - 1) if zero is None else zero[column // group].double()
        value[:, column] = (codes[:, column].double() - shift) * scale[column // group].double()
    permutation = torch.randperm(k).to(torch.int32) if order else None
    return IntegerWeight(pack_rows(codes, bits), scale, zero, bits, group, permutation), value


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_packed_and_unpacked(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 38), dtype=torch.uint8)
    data = pack_rows(codes, bits)
    assert data.shape == (5, 38 * bits // 8)
    assert torch.equal(unpack_rows(data, bits), codes)
    if bits == 4:
        assert int(data[3, 7]) == int(codes[3, 14]) + 16 * int(codes[3, 15])


@pytest.mark.parametrize(("bits", "group", "zeros", "order"), [
    (4, 32, True, False), (4, 96, False, True), (8, 16, True, True), (8, 10_000, False, False), (4, 5, True, False),
])  # fmt: skip
def test_the_reference_follows_the_definition(bits: int, group: int, zeros: bool, order: bool) -> None:
    weight, value = random_weight(24, 160, bits, group, zeros=zeros, order=order)
    torch.testing.assert_close(dequantize_integers(weight, torch.float32).double(), value, rtol=1e-6, atol=0.0)
    x, bias = torch.randn(7, 160), torch.randn(24)
    placed = x if weight.order is None else x[:, weight.order.long()]
    expected = placed.double() @ value.t() + bias.double()
    torch.testing.assert_close(integer_linear(x, weight, bias=bias).double(), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named() -> None:
    good, _ = random_weight(8, 64, 4, 32)
    with pytest.raises(ValueError, match=r"scales are floats \(4, 8\)"):
        IntegerWeight(good.data, good.scale, None, 4, 16)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        IntegerWeight(good.data, good.scale, None, 3, 32)
    with pytest.raises(ValueError, match="zero points are uint8"):
        IntegerWeight(good.data, good.scale, torch.zeros(2, 8), 4, 32)
    with pytest.raises(ValueError, match=r"x is \(2, 63\)"):
        integer_linear(torch.zeros(2, 63), good)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("f", [32, 96, 160])
def test_rows_of_gate_and_up_are_stored_in_turn(f: int, bits: int) -> None:
    """In random lots, over what was there before."""
    draw, k, group = random.Random(f), 192, 64
    torch.manual_seed(f)
    codes = torch.randint(0, 1 << bits, (2 * f, k), dtype=torch.uint8)
    scale, zero = torch.rand(k // group, 2 * f), torch.randint(0, 16, (k // group, 2 * f), dtype=torch.uint8)
    data = torch.randint(0, 256, (2 * f, k * bits // 8), dtype=torch.uint8)
    weight = IntegerWeight(data, torch.rand_like(scale), torch.ones_like(zero), bits, group, layout="pairs")
    cuts = sorted({0, 2 * f, *(32 * draw.randrange(1, 2 * f // 32) for _ in range(3))})
    for first, last in draw.sample(lots := list(itertools.pairwise(cuts)), len(lots)):
        rows = slice(first, last)
        store_integers(weight, first, codes[rows], scale[:, rows], zero[:, rows])
    spread = [each.repeat_interleave(group, 0).t() for each in (scale, zero.float())]
    assert torch.equal(dequantize_integers(weight, torch.float32), (codes.float() - spread[1]) * spread[0])
    stored = from_fragments(weight.data, weight.kind)
    assert torch.equal(stored[0::2], codes[:f])
    assert torch.equal(stored[1::2], codes[f:])


def test_a_gated_product_is_that_of_gate_and_up_in_their_order() -> None:
    torch.manual_seed(3)
    weight, value = random_weight(192, 128, 4, 32, order=True)
    pairs = replace(weight, data=torch.empty_like(weight.data), scale=torch.empty_like(weight.scale),
                    zero=torch.empty_like(weight.zero), layout="pairs")  # type: ignore[arg-type]  # fmt: skip
    store_integers(pairs, 0, unpack_rows(weight.data, 4), weight.scale, weight.zero)
    x = torch.randn(5, 128)
    gate, up = (x[:, weight.order.long()].double() @ value.t()).chunk(2, dim=1)  # type: ignore[union-attr]
    for each in (weight, pairs):
        torch.testing.assert_close(
            linear_silu_mul(x, each).double(), gate * up * torch.sigmoid(gate), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match=r"takes a dense \[2F, K\] weight, not int4 \(191, 128\)"):
        linear_silu_mul(x, random_weight(191, 128, 4, 32)[0])


def test_pairs_that_do_not_fit_are_refused() -> None:
    codes, scale = torch.zeros(48, 64, dtype=torch.uint8), torch.ones(2, 48)
    weight = IntegerWeight(codes[:, :32].clone(), scale, None, 4, 32, layout="pairs")
    with pytest.raises(ValueError, match="multiples of 32 rows"):
        store_integers(weight, 0, codes, scale, None)
