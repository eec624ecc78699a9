"""Norms of spans that lie in parts, against the norm of the whole."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.norm import gated_rms_norm, mean_squares, rms_norm_by, rms_norm_columns

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_beside_a_gate_make_the_norm_of_the_whole(dtype: torch.dtype, device: torch.device) -> None:
    parts, width, tokens = 3, random.choice([21, 40, 130]), 5
    wide = torch.randn(tokens, 2 * parts * width + 7, device=device).to(dtype)
    x, gate = wide[:, : parts * width], wide[:, -parts * width :]
    weight = torch.randn(parts * width, device=device).to(dtype)
    expected = gated_rms_norm(x, gate, weight, 1e-5, group=parts * width, gate_first=True)
    spans = [slice(part * width, (part + 1) * width) for part in range(parts)]
    means = torch.stack([mean_squares(x[:, at], [width], gate=gate[:, at]) for at in spans]).mean(0)
    kept = wide.clone()
    for at in spans:
        got = rms_norm_by(x[:, at], [weight[at]], means, 1e-5, gate=gate[:, at])
        torch.testing.assert_close(got, expected[:, at], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(wide, kept)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_spans_are_normed_in_place_by_what_is_given(dtype: torch.dtype, device: torch.device) -> None:
    widths, behind = (random.choice([24, 72]), random.choice([8, 23])), 9
    x = torch.randn(4, sum(widths) + behind, device=device).to(dtype)
    weights = [torch.randn(width, device=device).to(dtype) for width in widths]
    expected, last = x.clone(), x[:, sum(widths) :].clone()
    rms_norm_columns(expected, tuple(weights), 1e-6)
    means = mean_squares(x, widths)
    assert means.shape == (4, 2)
    rms_norm_by(x, weights, means, 1e-6)
    torch.testing.assert_close(x, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(x[:, sum(widths) :], last)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = torch.randn(2, 12, device=device)
    with pytest.raises(ValueError, match=r"no spans of \[9, 4\]"):
        mean_squares(x, [9, 4])
    with pytest.raises(ValueError, match="its gate differs"):
        mean_squares(x, [6], gate=x)
    with pytest.raises(ValueError, match=r"means \[2, 1\] of 2 spans"):
        rms_norm_by(x, [x[0, :4], x[0, :4]], torch.ones(2, 1, device=device), 1e-5)
