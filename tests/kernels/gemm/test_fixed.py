"""Batch-invariant products: the same bits for a row alone and in any number, on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.gemm import fixed
from stoker_kernels.gemm.cpu import dot
from stoker_kernels.gemm.reference import dequantize_activations, linear, linear_fp64, linear_silu_mul
from stoker_kernels.launch import cpu_dot as products
from stoker_kernels.quant import LinearWeight, WeightKind, quantize_fp8, quantize_weight


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(m * n + k)
    shapes = ((m, k), (n, k), (n,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.to(dtype) for each in (x, weight * k**-0.5, bias)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize(("n", "k"), [(37, 83), (301, 160)])
def test_a_row_on_a_cpu_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, kind: WeightKind, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot, "WIDENED_AT_ONCE", 128 * k)  # a quantized weight in several pieces
    monkeypatch.setattr(products, "THREAD_BYTES", 0)
    x, weight, bias = operands(39, n, k, dtype)
    packed = quantize_weight(weight, kind)
    whole = dot.linear(x, packed, bias=bias)
    want = linear(x.float(), packed, bias=bias) if kind != "dense" else linear_fp64(x, packed, bias)
    torch.testing.assert_close(whole.double(), want.double(), rtol=2.0**-7, atol=1e-5)
    for first, last in ((0, 1), (38, 39), (3, 20), (1, 37)):
        assert torch.equal(dot.linear(x[first:last], packed, bias=bias), whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize(
    ("n", "k"), [(4608, 3584), (3584, 18944), (37888, 3584), (1000, 640), (2056, 128), (152064, 3584), (136, 7168)]
)
def test_a_row_on_a_gpu_has_the_same_bits_in_every_batch(kind: WeightKind, n: int, k: int) -> None:
    x, weight, bias = (each.cuda() for each in operands(700, n, k, torch.bfloat16))
    packed = quantize_weight(weight, kind)
    whole = fixed.linear(x, packed, bias=bias, out=None)
    want = linear_fp64(x[:64] if kind == "dense" else quantize_fp8(x[:64]), packed, bias)
    torch.testing.assert_close(whole[:64].double(), want, rtol=2.0**-6, atol=2e-2 * float(want.abs().mean()))
    for count in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 300):
        for first in (0, 123, 700 - count):
            part = fixed.linear(x[first : first + count].clone(), packed, bias=bias, out=None)
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize(("n", "k"), [(37888, 3584), (6016, 1152), (272, 8192), (1048, 640)])
def test_gate_and_up_on_a_gpu_have_the_same_bits_in_every_batch(kind: WeightKind, n: int, k: int) -> None:
    x, weight, _ = (each.cuda() for each in operands(500, n, k, torch.bfloat16))
    packed = quantize_weight(weight, kind)
    whole = joined(x, packed)
    want = linear_silu_mul(x[:64] if kind == "dense" else quantize_fp8(x[:64]), packed)
    want = want if isinstance(want, torch.Tensor) else dequantize_activations(want)
    torch.testing.assert_close(whole[:64].float(), want.float(), rtol=2.0**-3, atol=2e-2 * float(want.abs().max()))
    for count in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300):
        for first in (0, 123, 500 - count):
            assert torch.equal(joined(x[first : first + count].clone(), packed), whole[first : first + count])


def joined(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    found = fixed.linear_silu_mul(x if weight.kind == "dense" else quantize_fp8(x), weight)
    return found if isinstance(found, torch.Tensor) else dequantize_activations(found)
