"""Quantization to FP8 in Triton against its definition."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.quant import Quantized, triton_quant

# Triton's interpreter converts runtime loop bounds that way.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def values(rows: int, columns: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix("rows", "columns")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (4, 5000), (4, 40000), (260, 9000)])  # held in registers, or not
def test_quantization_has_the_bits_of_its_definition(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = (values(rows, columns) * torch.tensor([[1e-3], [1.0], [0.0], [1e4]]).repeat(rows // 4, 1)).to(device, dtype)
    got, expected = triton_quant.quantize_fp8(x), Quantized.of(x.cpu().float())
    assert torch.equal(got.scale.cpu(), expected.scale)
    assert torch.equal(got.data.cpu().view(torch.uint8), expected.data.view(torch.uint8))
