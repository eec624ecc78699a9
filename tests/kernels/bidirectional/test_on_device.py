"""The kernels of encoders against their references: bidirectional attention, layer norm, plain activations."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.activation import op as activation
from stoker_kernels.activation import reference as activation_reference
from stoker_kernels.bidirectional import bidirectional_attention
from stoker_kernels.bidirectional import reference as attention_reference
from stoker_kernels.norm import layer_norm
from stoker_kernels.norm import reference as norm_reference

# exp of a large value is infinity on purpose; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
# The interpreter's product of bf16 matrices is garbage.
PRODUCT_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [((1,), 1, 32), ((64, 65, 1, 63), 2, 32), ((3, 130, 17), 3, 64), ((5, 9), 2, 24), ((70,), 1, 128)],
)
def test_attention_matches(
    lengths: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    width = heads * dim
    qkv = torch.randn(sum(lengths), 3 * width, generator=generator).to(device, dtype)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in qkv.split(width, dim=1))
    starts = _starts(lengths, device)
    out = torch.full((sum(lengths), heads, dim), float("nan"), dtype=dtype, device=device)
    got = bidirectional_attention(q, k, v, starts, scale=dim**-0.5, out=out)
    assert got is out
    expected = attention_reference.bidirectional_attention(q, k, v, starts, scale=dim**-0.5)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_more_sequences_than_a_block_of_the_search(device: torch.device) -> None:
    lengths = tuple(1 + at % 3 for at in range(140))
    q, k, v = torch.randn(3, sum(lengths), 1, 32, generator=torch.Generator().manual_seed(1)).to(device)
    starts = _starts(lengths, device)
    torch.testing.assert_close(
        bidirectional_attention(q, k, v, starts, scale=0.2),
        attention_reference.bidirectional_attention(q, k, v, starts, scale=0.2),
        rtol=1e-5,
        atol=1e-5,
    )


def test_attention_refuses_scattered_heads(device: torch.device) -> None:
    q = torch.zeros(4, 2, 32, device=device)
    with pytest.raises(ValueError, match="k's heads must be contiguous"):
        bidirectional_attention(q, q.transpose(0, 1).contiguous().transpose(0, 1), q, _starts((4,), device), scale=1.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 384), (5, 1000)])
def test_layer_norm_matches(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows * hidden)
    x, residual = (3 + torch.randn(2, rows, hidden, generator=generator)).to(device, dtype)
    weight, bias = torch.randn(2, hidden, generator=generator).to(device, dtype)
    for added in (None, residual):
        out = torch.full_like(x, float("nan"))
        got = layer_norm(x, weight, bias, 1e-12, residual=added, out=out)
        assert got is out
        expected = norm_reference.layer_norm(x, weight, bias, 1e-12, residual=added)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_plain_activations_match(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = (4 * torch.randn(3, 1100, generator=torch.Generator().manual_seed(7))).to(device, dtype)
    expected = getattr(activation_reference, name)(x)
    got = getattr(activation, name)(x, out=x)
    assert got is x
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_to_do(device: torch.device) -> None:
    x = torch.zeros(0, 64, device=device)
    assert layer_norm(x, x.new_ones(64), x.new_ones(64), 1e-12).shape == (0, 64)
    assert activation.gelu(x).shape == (0, 64)
