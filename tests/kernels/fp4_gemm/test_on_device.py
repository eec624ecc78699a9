"""Products with weights in NVFP4 and MXFP4 in Triton against their reference, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.fp4_gemm.test_fp4_gemm import random_weight

from stoker_kernels.fp4_gemm import choose, reference, triton_fp4
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import Fp4Kind

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
