"""Weights in NVFP4 and MXFP4: values by the definition of the number formats, products, and what does not fit."""

from __future__ import annotations

import math

import pytest
import torch

from stoker_kernels.fp4_gemm import dequantize_fp4, fp4_linear
from stoker_kernels.gemm import linear
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight


def random_weight(n: int, k: int, kind: Fp4Kind, device: str | torch.device = "cpu") -> Fp4Weight:
    """Any codes, and scales of every finite exponent that keeps products within 16 bits."""
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    shape = (k // FP4_BLOCKS[kind], n)
    if kind == "mxfp4":
        return Fp4Weight(data, torch.randint(118, 131, shape, dtype=torch.uint8, device=device), None, kind)
    # All but NaN (0x7f, 0xff), both signs, numbers below the normal ones among them.
    scale = torch.randint(0, 127, shape, dtype=torch.uint8, device=device)
    scale |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7
    return Fp4Weight(data, scale, torch.rand(n, device=device) * 0.02 + 0.001, kind)


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def value(weight: Fp4Weight) -> torch.Tensor:
    """[N, K] in fp64, number by number."""
    found = torch.empty(weight.out_features, weight.in_features, dtype=torch.float64)
    for n in range(weight.out_features):
        factor = 1.0 if weight.factor is None else float(weight.factor[n])
        for k in range(weight.in_features):
            code = int(weight.data[n, k // 2]) >> 4 * (k % 2) & 15
            bits = int(weight.scale[k // weight.block, n])
            scale = e4m3(bits) if weight.kind == "nvfp4" else math.ldexp(1.0, bits - 127)
            found[n, k] = e2m1(code) * scale * factor
    return found


@pytest.mark.parametrize(("kind", "n", "k"), [("nvfp4", 37, 80), ("mxfp4", 21, 96)])
def test_the_reference_follows_the_definition(kind: Fp4Kind, n: int, k: int) -> None:
    weight = random_weight(n, k, kind)
    exact = value(weight)
    torch.testing.assert_close(dequantize_fp4(weight, torch.float32).double(), exact, rtol=3e-7, atol=0.0)
    x, bias = torch.randn(5, k), torch.randn(n)
    expected = x.double() @ exact.t() + bias.double()
    torch.testing.assert_close(linear(x, weight, bias=bias).double(), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named() -> None:
    good = random_weight(8, 64, "nvfp4")
    with pytest.raises(ValueError, match=r"scales are contiguous uint8 \(4, 8\)"):
        Fp4Weight(good.data, good.scale[:2].contiguous(), good.factor, "nvfp4")
    with pytest.raises(ValueError, match="72 columns fill no whole blocks of 16"):
        Fp4Weight(torch.zeros(8, 36, dtype=torch.uint8), good.scale, good.factor, "nvfp4")
    with pytest.raises(ValueError, match="the factors of mxfp4 rows are None"):
        Fp4Weight(good.data, good.scale[:2].contiguous(), good.factor, "mxfp4")
    with pytest.raises(ValueError, match=r"x is \(2, 63\)"):
        fp4_linear(torch.zeros(2, 63), good)
