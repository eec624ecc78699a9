"""Norms on a CPU against the reference: any shape, pages and slots in any order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rounding import close

from stoker_kernels.norm import cpu_norm
from stoker_kernels.norm import reference as norm_reference

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LAX = settings(deadline=None, max_examples=60)


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
