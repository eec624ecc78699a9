"""SwiGLU on a CPU against the reference, from gates that saturate to those that vanish."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rounding import close

from stoker_kernels.activation import compiled_activation, reference
from stoker_kernels.launch import cc

COMPILED = cc.refusal("cpu_activation")


@pytest.mark.skipif(COMPILED is not None, reason=f"compiled activation: {COMPILED}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [16, 272, 1536, 19])
def test_silu_and_mul(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * columns)
    x[:, :columns] *= torch.logspace(-6, 2, columns)
    x = x.to(dtype)
    expected, out = reference.silu_and_mul(x), torch.empty(5, columns, dtype=dtype)
    assert compiled_activation.silu_and_mul(x, out=out) is out
    close(out, expected, parts=8)
    assert torch.equal(compiled_activation.silu_and_mul(x), out)
