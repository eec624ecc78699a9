"""Products with weights in NVFP4 and MXFP4 against their reference: in Triton, in the interpreter and on a GPU, and by
the Hopper kernels.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.fp4_gemm.test_fp4_gemm import random_weight

from stoker_kernels.fp4_gemm import choose, reference, store_fp4, triton_fp4
from stoker_kernels.fragment_gemm import fragments_refusal
from stoker_kernels.gemm import linear_silu_mul
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import Fp4Kind, Fp4Weight, Layout

SHAPES: list[tuple[Fp4Kind, int, int, int]] = [("nvfp4", 70, 176, 3), ("mxfp4", 97, 160, 18), ("nvfp4", 33, 16, 65)]


def cut_off(dtype: torch.dtype) -> bool:
    """The interpreter cuts bf16 off where a GPU rounds it."""
    return interpreting() and dtype == torch.bfloat16


@pytest.mark.matrix("n")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), SHAPES)
def test_products_and_values_match(
    kind: Fp4Kind, n: int, k: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random_weight(n, k, kind, device)
    exact = reference.dequantize_fp4(weight, dtype)
    dense = torch.full((n, k), float("nan"), dtype=dtype, device=device)
    triton_fp4.dequantize(weight, dense)
    torch.testing.assert_close(dense, exact, rtol=2.0**-7 if cut_off(dtype) else 0.0, atol=0.0)
    for bias in (None, torch.randn(n, device=device).to(dtype)):
        x = torch.randn(tokens, k, device=device).to(dtype)
        out = torch.full((tokens, n), float("nan"), dtype=dtype, device=device)
        triton_fp4.multiply(x, weight, bias, out, widen=interpreting())
        expected = x.double() @ exact.double().t() + (0.0 if bias is None else bias.double())
        assert (out.double() - expected).norm() < (1.2e-2 if cut_off(dtype) else 4e-3) * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 300])
def test_every_number_of_tokens_by_the_op(kind: Fp4Kind, tokens: int, device: torch.device) -> None:
    weight = random_weight(1040, 1184, kind, device)
    x, bias = torch.randn(tokens, 1184, device=device).bfloat16(), torch.randn(1040, device=device).bfloat16()
    got = choose.fp4_linear(x, weight, bias=bias, out=None)
    expected = x.double() @ reference.dequantize_fp4(weight, torch.bfloat16).double().t() + bias.double()
    assert (got.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(got, choose.fp4_linear(x, weight, bias=bias, out=None))


def in_fragments(rows: Fp4Weight, layout: Layout) -> Fp4Weight:
    """The same weight as the Hopper kernels read it."""
    empty = [None if part is None else torch.empty_like(part) for part in (rows.data, rows.scale, rows.factor)]
    weight = Fp4Weight(*empty, rows.kind, layout)  # type: ignore[arg-type]
    store_fp4(weight, 0, rows.data, rows.scale, rows.factor)
    return weight


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 5, 8, 11, 16, 27, 50, 101, 190, 300, 1100, 1700])
def test_fragments_give_what_rows_give(kind: Fp4Kind, tokens: int, device: torch.device) -> None:
    """By the op: every kernel, and the one that dequantizes."""
    reason = fragments_refusal(torch.bfloat16, device, "fp4")
    if reason:
        pytest.skip(reason)
    n, k = 64 * random.randrange(1, 40), 64 * random.randrange(1, 40)
    rows = random_weight(n, k, kind, device)
    weight = in_fragments(rows, "fragments")
    exact = reference.dequantize_fp4(rows, torch.bfloat16)
    assert torch.equal(choose.scratch(weight, torch.bfloat16), exact)
    x, bias = torch.randn(tokens, k, device=device).bfloat16(), torch.randn(n, device=device).bfloat16()
    got = choose.fp4_linear(x, weight, bias=bias, out=None)
    expected = x.double() @ exact.double().t() + bias.double()
    assert (got.double() - expected).norm() < 4e-3 * expected.norm(), (n, k)
    assert torch.equal(got, choose.fp4_linear(x, weight, bias=bias, out=None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 23, 48, 77, 150, 259, 700, 1025, 5700])
def test_gate_and_up_in_turn_give_what_rows_give(kind: Fp4Kind, tokens: int, device: torch.device) -> None:
    """With the activation, and without: every kernel, and the ones that dequantize."""
    reason = fragments_refusal(torch.bfloat16, device, "fp4")
    if reason:
        pytest.skip(reason)
    n, k = 64 * random.randrange(1, 24), 64 * random.randrange(1, 24)
    rows = random_weight(n, k, kind, device)
    if rows.factor is None:
        rows.scale.clamp_(max=122)
    weight = in_fragments(rows, "pairs")
    x = torch.randn(tokens, k, device=device).bfloat16()
    both = x.double() @ reference.dequantize_fp4(rows, torch.bfloat16).double().t()
    gate, up = both.chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    got = linear_silu_mul(x, weight)
    assert torch.equal(got, linear_silu_mul(x, weight))
    assert (got.double() - exact).norm() < 6e-3 * exact.norm(), (n, k)
    plain = choose.fp4_linear(x, weight, bias=None, out=None)
    assert (plain.double() - both).norm() < 4e-3 * both.norm(), (n, k)
