"""The norm kernels against their reference."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels import norm
from stoker_kernels.norm import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _inputs(
    rows: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * hidden)
    x, residual = torch.randn(2, rows, hidden, generator=generator)
    weight = torch.rand(hidden, generator=generator) + 0.5
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 576), (5, 1000), (2, 4096)])
def test_norms_match(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = _inputs(rows, hidden, dtype, device)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=tolerance, atol=tolerance
    )
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    out = torch.full_like(x, float("nan"))
    got = norm.add_rms_norm(x, residual, weight, 1e-6, out=out)
    assert got is out
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    # bf16 rounds differently in the interpreter: it truncates.
    torch.testing.assert_close(residual, expected_residual, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("normed", [False, True])
def test_updates_are_normed_and_scaled(
    normed: bool, multiplier: float, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual, weight = _inputs(3, 1000, dtype, device)
    weight = weight.float()  # as it is where 1 is added to it
    post = weight.flip(0) if normed else None
    kept = residual.clone()
    expected = reference.add_rms_norm(x, kept, weight, 1e-6, post=post, multiplier=multiplier)
    got = norm.add_rms_norm(x, residual, weight, 1e-6, post=post, multiplier=multiplier)
    for mine, theirs in ((residual, kept), (got, expected)):
        torch.testing.assert_close(mine, theirs, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_is_added_is_normed(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, post = _inputs(5, 70, dtype, device)
    kept = residual.clone()
    reference.add_normed(x, kept, post, 1e-6)
    norm.add_normed(x, residual, post, 1e-6)
    torch.testing.assert_close(residual, kept, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("widths", [(1100,), (90, 30), (30, 90)])
def test_columns_are_normed_in_place(widths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, _, weight = _inputs(3, sum(widths) + 17, dtype, device)
    spans = weight[: sum(widths)].split(list(widths))
    expected = x.clone()
    reference.rms_norm_columns(expected, spans, 1e-6)
    norm.rms_norm_columns(x, spans, 1e-6)
    torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantized_norms_match(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = _inputs(3, 576, dtype, device)
    x[1] = 0
    for got, expected in (
        (norm.rms_norm_quant(x, weight, 1e-6), reference.rms_norm_quant(x, weight, 1e-6)),
        (
            norm.add_rms_norm_quant(x, residual.clone(), weight, 1e-6),
            reference.add_rms_norm_quant(x, residual.clone(), weight, 1e-6),
        ),
    ):
        torch.testing.assert_close(got.scale, expected.scale)
        # One unit of e4m3's three mantissa bits: the two may round a value near a tie apart.
        torch.testing.assert_close(got.data.float(), expected.data.float(), rtol=0.126, atol=2**-9)
        agreement = (got.data.float() == expected.data.float()).float().mean().item()
        assert agreement > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_in_integers_match(dtype: torch.dtype, device: torch.device) -> None:
    rows, hidden = random.randint(2, 5), 8 * random.randint(9, 90)
    x, residual, weight = _inputs(rows, hidden, dtype, device)
    x[1], residual[1] = 0, 0
    mine, theirs = residual.clone(), residual.clone()
    for got, expected in (
        (norm.rms_norm_quant(x, weight, 1e-6, torch.int8), reference.rms_norm_quant(x, weight, 1e-6, torch.int8)),
        (
            norm.add_rms_norm_quant(x, mine, weight, 1e-6, torch.int8),
            reference.add_rms_norm_quant(x, theirs, weight, 1e-6, torch.int8),
        ),
    ):
        assert got.data.dtype == torch.int8
        torch.testing.assert_close(got.scale, expected.scale)
        # The two may round a value near a tie apart.
        assert (got.data.int() - expected.data.int()).abs().max() <= 1
        assert (got.data == expected.data).float().mean() > 0.99
        assert got.data[0].abs().max() == 127
    assert torch.equal(mine, theirs)


def test_rows_may_be_a_slice(device: torch.device) -> None:
    x, _, weight = _inputs(4, 128, torch.float32, device)
    sliced = x[:, :64]
    torch.testing.assert_close(norm.rms_norm(sliced, weight[:64], 1e-6), reference.rms_norm(sliced, weight[:64], 1e-6))


def test_a_row_too_long_is_refused(device: torch.device) -> None:
    x = torch.zeros(1, 65537, device=device)
    with pytest.raises(ValueError, match="at most 65536"):
        norm.rms_norm(x, x[0], 1e-6)


def test_no_rows(device: torch.device) -> None:
    x = torch.zeros(0, 64, device=device)
    assert norm.rms_norm(x, torch.ones(64, device=device), 1e-6).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 3584, 8192])
@pytest.mark.parametrize("rows", [1, 129, 8192])
def test_norms_match_at_real_sizes(rows: int, hidden: int, device: torch.device) -> None:
    x, residual, weight = _inputs(rows, hidden, torch.bfloat16, device)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    got = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(got, expected, rtol=8e-3, atol=1e-4)
