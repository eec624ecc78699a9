"""Products in integers of eight bits in Triton against their reference, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.int8_gemm.test_int8_gemm import random_weight

from stoker_kernels.int8_gemm import reference, triton_int8
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import quantize_int8, quantize_int8_rows

SHAPES = [(70, 176, 3), (97, 2100, 18), (33, 40, 65)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "tokens"), SHAPES)
def test_integers_and_products_match(n: int, k: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, x = random_weight(n, k, device), torch.randn(tokens, k, device=device).to(dtype)
    x[0] = 0.0
    data, scale = quantize_int8_rows(x)
    expected, expected_scale = quantize_int8(x)
    assert torch.equal(data, expected)
    assert torch.equal(scale, expected_scale)
    for bias in (None, torch.randn(n, device=device).to(dtype)):
        out = torch.full((tokens, n), float("nan"), dtype=dtype, device=device)
        triton_int8.int8_linear(x, weight, bias=bias, out=out)
        exact = reference.int8_linear(x, weight, bias=bias, out=None)
        # The interpreter cuts bf16 off where a GPU rounds it.
        step = 2.0**-7 if dtype == torch.bfloat16 and interpreting() else 2.0**-8
        torch.testing.assert_close(out, exact, rtol=step, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 300])
def test_every_number_of_tokens_by_the_op(tokens: int, device: torch.device) -> None:
    weight, x = random_weight(1040, 1184, device), torch.randn(tokens, 1184, device=device).bfloat16()
    bias = torch.randn(1040, device=device).bfloat16()
    got = triton_int8.int8_linear(x, weight, bias=bias, out=None)
    torch.testing.assert_close(got, reference.int8_linear(x, weight, bias=bias, out=None), rtol=2.0**-7, atol=1e-4)
    assert torch.equal(got, triton_int8.int8_linear(x, weight, bias=bias, out=None))
