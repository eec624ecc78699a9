"""Layer norm against its reference."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.norm import add_layer_norm, layer_norm, reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


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
        expected = reference.layer_norm(x, weight, bias, 1e-12, residual=added)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_to_do(device: torch.device) -> None:
    x = torch.zeros(0, 64, device=device)
    assert layer_norm(x, x.new_ones(64), x.new_ones(64), 1e-12).shape == (0, 64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_kept_sum_is_what_is_normed(shifted: bool, second: bool, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(11)
    x, also, residual = (2 + torch.randn(3, 4, 1000, generator=generator)).to(device, dtype)
    weight = torch.randn(1000, generator=generator).to(device)  # fp32 beside any stream
    bias = weight.flip(0).to(dtype) if shifted else None
    branch = also if second else None
    kept = residual.clone()
    expected = reference.add_layer_norm(x, kept, weight, bias, 1e-5, also=branch)
    got = add_layer_norm(x, residual, weight, bias, 1e-5, also=branch, out=x)
    assert got is x
    torch.testing.assert_close(residual, kept, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # The interpreter truncates the kept sum where the reference rounds it.
    torch.testing.assert_close(got, expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_without_a_bias(device: torch.device) -> None:
    x, weight = torch.randn(3, 70, device=device), torch.randn(70, device=device)
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))
