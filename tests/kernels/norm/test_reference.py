"""The reference of the norms against torch's own functions, and fp8 by hand."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import norm


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(3, 40), torch.rand(40)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (40,), weight, 1e-5))


def test_add_rms_norm_keeps_the_sum() -> None:
    x, residual, weight = torch.randn(3, 40).bfloat16(), torch.randn(3, 40).bfloat16(), torch.ones(40).bfloat16()
    expected_sum = x + residual
    got = norm.add_rms_norm(x, residual, weight, 1e-5, out=x)
    assert got is x
    assert torch.equal(residual, expected_sum)
    assert torch.equal(got, norm.rms_norm(expected_sum, weight, 1e-5))


@pytest.mark.parametrize("zero_row", [False, True])
def test_quantized_values_come_back(zero_row: bool) -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    if zero_row:
        x[1], residual[1] = 0, 0
    quantized = norm.add_rms_norm_quant(x, residual.clone(), weight, 1e-5)
    expected = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.scale.shape == (3, 1)
    # e4m3 has 3 mantissa bits: half a unit is 1/16; its least step is 2^-9 of the scale.
    error = (quantized.data.float() * quantized.scale - expected).abs()
    assert (error <= expected.abs() / 16 + quantized.scale * 2**-10 + 1e-9).all()
    assert quantized.data[0].float().abs().max() == 448
