"""Products in integers of eight bits: the definition, number by number, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.gemm import linear
from stoker_kernels.int8_gemm import int8_linear
from stoker_kernels.quant import Int8Weight, quantize_int8


def random_weight(n: int, k: int, device: str | torch.device = "cpu") -> Int8Weight:
    data = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    return Int8Weight(data, torch.rand(n, 1, device=device) * 0.01 + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "tokens"), [(37, 83, 1), (9, 2050, 21)])
def test_the_reference_follows_the_definition(n: int, k: int, tokens: int, dtype: torch.dtype) -> None:
    weight, bias = random_weight(n, k), torch.randn(n).to(dtype)
    x = (torch.randn(tokens, k) * torch.logspace(-3, 3, tokens).unsqueeze(1)).to(dtype)
    found = linear(x, weight, bias=bias)
    for row in range(tokens):
        values = x[row].tolist()
        scale = max(map(abs, values)) / 127
        integers = torch.tensor([round(value / scale) for value in values], dtype=torch.float64)
        exact = weight.data.double() @ integers * scale * weight.scale.double().flatten() + bias.double()
        # A value on the border between two integers may fall on either side.
        step = weight.data.double().abs().amax() * scale * weight.scale.double().amax()
        limit = 2 * step + exact.abs().amax() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-20)
        assert (found[row].double() - exact).abs().amax() <= limit


def test_rows_of_zeros_and_ties_to_even() -> None:
    data, scale = quantize_int8(torch.tensor([[0.0, 0.0, 0.0], [127.0, 0.5, -1.5]]))
    assert data.tolist() == [[0, 0, 0], [127, 0, -2]]
    assert scale[0] > 0


def test_what_does_not_fit_is_named() -> None:
    good = random_weight(8, 24)
    with pytest.raises(ValueError, match=r"scales are fp32 \(8, 1\), not torch.float32 \(8,\)"):
        Int8Weight(good.data, good.scale.flatten())
    with pytest.raises(ValueError, match="integers are contiguous int8"):
        Int8Weight(good.data.float(), good.scale)
    with pytest.raises(ValueError, match=r"x is \(2, 23\)"):
        int8_linear(torch.zeros(2, 23), good)
