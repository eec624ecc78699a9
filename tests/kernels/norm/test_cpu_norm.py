"""Norms on a CPU against the reference: any shape, pages and slots in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rounding import close

from stoker_kernels.launch import cc
from stoker_kernels.norm import compiled_norm, cpu_norm
from stoker_kernels.norm import reference as norm_reference

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
COMPILED = cc.refusal("cpu_norm")
LAX = settings(deadline=None, max_examples=40)


@LAX
@given(st.integers(1, 9), st.integers(1, 150), DTYPES, st.integers(0, 99))
def test_norms(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    close(cpu_norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    close(cpu_norm.add_rms_norm(x, mine, weight, 1e-5), norm_reference.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(mine, theirs)


@pytest.mark.skipif(COMPILED is not None, reason=f"compiled norms: {COMPILED}")
@LAX
@given(st.integers(1, 9), st.sampled_from([16, 48, 208, 1024, 50]), DTYPES, DTYPES, st.integers(0, 99))
def test_compiled_norms(rows: int, size: int, dtype: torch.dtype, kind: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(kind)
    close(compiled_norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5), parts=2)
    mine, theirs, factor = residual.clone(), residual.clone(), 0.5
    given_out = torch.empty_like(x)
    ours = compiled_norm.add_rms_norm(x, mine, weight, 1e-5, multiplier=factor, out=given_out)
    assert ours is given_out
    close(ours, norm_reference.add_rms_norm(x, theirs, weight, 1e-5, multiplier=factor), parts=2)
    assert torch.equal(mine, theirs)
    # A row depends on itself alone, whatever stands beside it.
    assert torch.equal(compiled_norm.rms_norm(x[-1:], weight, 1e-5), compiled_norm.rms_norm(x, weight, 1e-5)[-1:])
