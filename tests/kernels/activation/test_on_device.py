"""The gated activations against their reference, and what is quantized at once against both steps."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels import activation
from stoker_kernels.activation import reference, triton_quantizing
from stoker_kernels.quant import FP8, Quantized

RANDOM = random.Random()
GATED = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_gelu_and_mul")
PLAIN = ("gelu", "gelu_tanh", "relu2")
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


def quantizing(name: str, x: torch.Tensor, into: torch.dtype, limit: float) -> Quantized:
    bounds = (limit,) if name.startswith("clamped") else ()
    got: Quantized = getattr(activation, f"{name}_quant")(x, *bounds, into)
    return got


@pytest.mark.parametrize("into", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("name", [*GATED, *PLAIN])
def test_quantizing_is_the_activation_and_then_the_quantization(
    name: str, into: torch.dtype, device: torch.device
) -> None:
    """Bit for bit, of rows in one piece and in several, the last of them in part, and by either way to cut."""
    limit = RANDOM.uniform(0.4, 3.0)
    for columns in (RANDOM.randrange(1, 2048), RANDOM.randrange(2049, 4096), RANDOM.randrange(4097, 9999)):
        rows, wide = RANDOM.randrange(1, 5), columns * (2 if name in GATED else 1)
        whole = RANDOM.uniform(0.1, 6.0) * torch.randn(rows, wide + 16, device=device)
        whole[RANDOM.randrange(rows)] = 0.0
        x = whole.to(RANDOM.choice((torch.bfloat16, torch.float16)))[:, :wide]
        apart = getattr(activation, name)(x.float().contiguous(), *((limit,) if name.startswith("clamped") else ()))
        expected = Quantized.of(apart, into)
        for got in (
            quantizing(name, x, into, limit),
            triton_quantizing.quantizing_by_columns(
                x, into, name.removesuffix("_and_mul"), gated=name in GATED, limit=limit
            ),
        ):
            assert torch.equal(got.scale, expected.scale)
            assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("into", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("name", [*GATED, *PLAIN])
def test_quantizing_matches_the_reference(name: str, into: torch.dtype, device: torch.device) -> None:
    columns = RANDOM.choice((RANDOM.randrange(500, 900), RANDOM.randrange(4097, 9999)))
    x = 2 * torch.randn(RANDOM.randint(1, 4), columns * (2 if name in GATED else 1)).to(device)
    got = quantizing(name, x, into, 1.7)
    expected = reference.quantizing(x, into, name.removesuffix("_and_mul"), gated=name in GATED, limit=1.7)
    torch.testing.assert_close(got.scale, expected.scale)
    equal = (got.data.float() == expected.data.float()).float().mean().item()
    assert equal > 0.99
    torch.testing.assert_close(
        got.data.float(), expected.data.float(), rtol=0.126 if into == FP8 else 0.0, atol=1.0 if into != FP8 else 2**-9
    )
    if into == torch.int8:
        assert got.data.abs().amax(1).eq(127).all()


@pytest.mark.parametrize(("name", "wide"), [("gelu_and_mul", 2 * 65537), ("relu2", 65537)])
def test_a_row_that_is_too_long_to_be_quantized_is_refused(name: str, wide: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="at most 65536 columns; got 65537"):
        quantizing(name, torch.zeros(1, wide, device=device), FP8, 0.0)


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
