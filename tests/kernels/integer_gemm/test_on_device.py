"""Products with integer weights against their reference: Triton's of the layout "rows", the Hopper kernels' of
fragments.
"""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.fragment_gemm import fragments_refusal, to_fragments
from stoker_kernels.gemm import linear_silu_mul
from stoker_kernels.integer_gemm import choose, reference, store_integers, triton_integer
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import IntegerWeight, integer_scale_shape, pack_rows

SHAPES = [(96, 160, 4, 32, 3), (70, 192, 4, 192, 1), (130, 96, 8, 48, 19), (64, 48, 8, 16, 70)]


def random_weight(
    n: int, k: int, bits: int, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> IntegerWeight:
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    shape = integer_scale_shape(n, k, group)
    scale = ((torch.rand(shape, device=device) + 0.2) * 2.0 ** (2 - bits)).to(dtype)
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device=device) if zeros else None
    return IntegerWeight(pack_rows(codes, bits), scale, zero, bits, group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "bits", "group", "tokens"), SHAPES)
def test_products_match(
    n: int, k: int, bits: int, group: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    for zeros in (True, False):
        weight = random_weight(n, k, bits, group, zeros, dtype, device)
        x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
        out = torch.full((tokens, n), float("nan"), dtype=dtype, device=device)
        triton_integer.multiply(x, weight, bias if zeros else None, out, widen=interpreting())
        value = reference.dequantize_integers(weight, dtype).double()
        expected = x.double() @ value.t() + (bias.double() if zeros else 0.0)
        # The interpreter cuts bf16 off where a GPU rounds it.
        bound = 1.2e-2 if interpreting() and dtype == torch.bfloat16 else 4e-3
        assert (out.double() - expected).norm() < bound * expected.norm()


@pytest.mark.matrix("n", "k", "bits", "group")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "bits", "group", "tokens"), SHAPES)
def test_dequantized_weights_are_the_reference_s(
    n: int, k: int, bits: int, group: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random_weight(n, k, bits, group, tokens % 2 == 0, dtype, device)
    out = torch.full((n, k), float("nan"), dtype=dtype, device=device)
    triton_integer.dequantize(weight, out)
    # The interpreter cuts bf16 off where a GPU rounds it.
    step = 2.0**-7 if interpreting() and dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(out, reference.dequantize_integers(weight, dtype), rtol=step, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 192, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 5, 11, 16, 27, 50, 101, 190, 300, 1100])
def test_fragments_give_what_rows_give(bits: int, group: int, tokens: int, device: torch.device) -> None:
    """By the op: every kernel, groups smaller and larger than a block, columns in another order."""
    reason = fragments_refusal(torch.bfloat16, device, "int4" if bits == 4 else "int8")
    if reason:
        pytest.skip(reason)
    if group == 192:
        group, k = 128, 128 * 13
    else:
        k = 64 * (7 + tokens % 5)
    group, n = min(group, k), 64 * (3 + tokens % 11)
    rows = random_weight(n, k, bits, group, tokens % 2 == 1, torch.bfloat16, device)
    order = torch.randperm(k, device=device).to(torch.int32) if tokens % 3 == 0 else None
    codes = reference.codes_of(rows)
    weight = IntegerWeight(to_fragments(codes, rows.kind), rows.scale, rows.zero, bits, group, order, "fragments")
    x, bias = torch.randn(tokens, k, device=device).bfloat16(), torch.randn(n, device=device).bfloat16()
    got = choose.integer_linear(x, weight, bias=bias, out=None)
    again = choose.integer_linear(x, weight, bias=bias, out=None)
    placed = x if order is None else x[:, order.long()]
    expected = placed.double() @ reference.dequantize_integers(rows, torch.bfloat16).double().t() + bias.double()
    assert (got.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 23, 48, 77, 150, 259, 700, 1025, 2100])
def test_gate_and_up_in_turn_give_what_rows_give(bits: int, group: int, tokens: int, device: torch.device) -> None:
    """The product, and with its activation: every kernel, and the one that dequantizes."""
    reason = fragments_refusal(torch.bfloat16, device, "int4" if bits == 4 else "int8")
    if reason:
        pytest.skip(reason)
    k, n = 128 * (3 + tokens % 7), 64 * (5 + tokens % 13)
    rows = random_weight(n, k, bits, group, tokens % 2 == 0, torch.bfloat16, device)
    order = torch.randperm(k, device=device).to(torch.int32) if tokens % 3 == 0 else None
    zero = None if rows.zero is None else torch.empty_like(rows.zero)
    weight = IntegerWeight(
        torch.empty_like(rows.data), torch.empty_like(rows.scale), zero, bits, group, order, layout="pairs"
    )
    store_integers(weight, 0, reference.codes_of(rows), rows.scale, rows.zero)
    x = torch.randn(tokens, k, device=device).bfloat16()
    placed = x if order is None else x[:, order.long()]
    both = placed.double() @ reference.dequantize_integers(rows, torch.bfloat16).double().t()
    gate, up = both.chunk(2, dim=1)
    got, again = linear_silu_mul(x, weight), linear_silu_mul(x, weight)
    assert torch.equal(got, again)
    exact = torch.nn.functional.silu(gate) * up
    assert (got.double() - exact).norm() < 6e-3 * exact.norm()
    plain = choose.integer_linear(x, weight, bias=None, out=None)
    assert (plain.double() - both).norm() < 4e-3 * both.norm()
