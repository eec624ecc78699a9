"""Scales of FP8 products in Triton against their definitions."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.gemm import triton_fp8_scale
from stoker_kernels.gemm.reference import linear_fp64, sum_error
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import Quantized, quantize_weight

# Triton's interpreter converts runtime loop bounds that way.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def values(rows: int, columns: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("channels", [1, 1030])
def test_scales_are_applied_in_place(channels: int, with_bias: bool, device: torch.device) -> None:
    y, x_scale, w_scale, bias = values(3, 1030), values(3, 1, 1), values(channels, 1, 2), values(1, 1030, 3)[0]
    expected = y * (x_scale * w_scale.T) + (bias if with_bias else 0)
    out = y.to(device)
    triton_fp8_scale.scale(out, x_scale.to(device), w_scale.to(device), bias.to(device) if with_bias else None, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (20, 200, 320)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_block_scales_equal_the_definition(m: int, n: int, k: int, with_bias: bool, device: torch.device) -> None:
    x, bias = Quantized.of(values(m, k)), values(1, n, 3)[0]
    weight = quantize_weight(values(n, k, 1) * torch.logspace(-2, 1, n).unsqueeze(1), "fp8_block")
    expected = linear_fp64(x, weight, bias if with_bias else None)
    assert weight.scale is not None
    out = torch.empty(m, n, device=device)
    triton_fp8_scale.block_scaled(
        Quantized(x.data.to(device), x.scale.to(device)), weight.data.to(device), weight.scale.to(device),
        bias.to(device) if with_bias else None, out, widen=interpreting(),
    )  # fmt: skip
    assert bool(((out.cpu().double() - expected).abs() <= sum_error(x, weight)).all())
