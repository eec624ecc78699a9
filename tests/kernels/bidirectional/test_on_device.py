"""Bidirectional attention against its reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from stoker_kernels.bidirectional import bidirectional_attention, reference

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
    [
        *(((1,), 1, 32), ((64, 65, 1, 63), 2, 32), ((3, 130, 17), 3, 64), ((5, 9), 2, 24), ((70,), 1, 128)),
        *(((66, 4), 2, 72), ((9, 67), 1, 80)),
    ],
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
    expected = reference.bidirectional_attention(q, k, v, starts, scale=dim**-0.5)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("window", [0, 5, 33, 64, 200])
def test_a_window_hides_what_is_farther_away(window: int, dtype: torch.dtype, device: torch.device) -> None:
    lengths, heads, dim = (150, 1, 97, 6), 1, 32
    generator = torch.Generator().manual_seed(window)
    q, k, v = torch.randn(3, sum(lengths), heads, dim, generator=generator).to(device, dtype)
    got = bidirectional_attention(q, k, v, _starts(lengths, device), scale=0.3, window=window)
    for one, end in zip(lengths, itertools.accumulate(lengths), strict=True):
        at = torch.arange(one, device=device)
        hidden = (at[:, None] - at).abs() > window
        query, key, value = (each[end - one : end].float().transpose(0, 1) for each in (q, k, v))
        weights = (query @ key.transpose(1, 2) * 0.3).masked_fill(hidden, -float("inf")).softmax(-1)
        expected = (weights @ value).transpose(0, 1).to(dtype)
        torch.testing.assert_close(got[end - one : end], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_more_sequences_than_a_block_of_the_search(device: torch.device) -> None:
    lengths = tuple(1 + at % 3 for at in range(140))
    q, k, v = torch.randn(3, sum(lengths), 1, 32, generator=torch.Generator().manual_seed(1)).to(device)
    starts = _starts(lengths, device)
    torch.testing.assert_close(
        bidirectional_attention(q, k, v, starts, scale=0.2),
        reference.bidirectional_attention(q, k, v, starts, scale=0.2),
        rtol=1e-5,
        atol=1e-5,
    )


def test_attention_refuses_scattered_heads(device: torch.device) -> None:
    q = torch.zeros(4, 2, 32, device=device)
    with pytest.raises(ValueError, match="k's heads must be contiguous"):
        bidirectional_attention(q, q.transpose(0, 1).contiguous().transpose(0, 1), q, _starts((4,), device), scale=1.0)
