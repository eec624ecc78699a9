"""The gated activations against their reference."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels import activation
from stoker_kernels.activation import reference

# exp of a large gate is infinity on purpose; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 1100)])
def test_activations_match(rows: int, columns: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = (4 * torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(7))).to(device, dtype)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=device)
    got = getattr(activation, name)(x, out=out)
    expected = getattr(reference, name)(x)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("limit", [0.0, 2.6])
def test_bounded_gates_match(limit: float, dtype: torch.dtype, device: torch.device) -> None:
    x = (3 * torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(8))).to(device, dtype)
    out = torch.full((3, 1100), float("nan"), dtype=dtype, device=device)
    assert activation.clamped_gelu_and_mul(x, limit, out=out) is out
    expected = reference.clamped_gelu_and_mul(x, limit)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_large_gates_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[-1e4, 1e4, -100.0, 100.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    expected = torch.tensor([[0.0, 1e4, 0.0, 100.0]], device=device)
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        torch.testing.assert_close(getattr(activation, name)(x), expected)


@pytest.mark.parametrize("columns", [768, 4608, 9000])  # one piece; several, the last one in part
def test_quantized_silu_matches(columns: int, device: torch.device) -> None:
    x = (2 * torch.randn(3, 2 * columns, generator=torch.Generator().manual_seed(7))).to(device)
    got, expected = activation.silu_and_mul_quant(x), reference.silu_and_mul_quant(x)
    torch.testing.assert_close(got.scale, expected.scale)
    torch.testing.assert_close(got.data.float(), expected.data.float(), rtol=0.126, atol=2**-9)
    assert (got.data.float() == expected.data.float()).float().mean().item() > 0.99


@pytest.mark.parametrize("columns", [768, 4608, 9000])
def test_silu_in_integers_matches(columns: int, device: torch.device) -> None:
    x = (2 * torch.randn(random.randint(1, 4), 2 * columns)).to(device)
    got, expected = activation.silu_and_mul_quant(x, torch.int8), reference.silu_and_mul_quant(x, torch.int8)
    torch.testing.assert_close(got.scale, expected.scale)
    assert (got.data.int() - expected.data.int()).abs().max() <= 1
    assert (got.data == expected.data).float().mean() > 0.99
    assert got.data.abs().amax(1).eq(127).all()


def test_an_odd_row_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="2F"):
        activation.silu_and_mul(torch.zeros(1, 3, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 129, 8192])
def test_silu_matches_at_real_sizes(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 2 * 18944, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(activation.silu_and_mul(x), reference.silu_and_mul(x), rtol=8e-3, atol=1e-4)
    quantized = activation.silu_and_mul_quant(x)
    dequantized = quantized.data.float() * quantized.scale
    torch.testing.assert_close(dequantized, reference.silu_and_mul(x).float(), rtol=0.08, atol=0.02)
