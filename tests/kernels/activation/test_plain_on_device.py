"""The plain activations against their references."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import activation
from stoker_kernels.activation import reference

# exp of a large value is infinity on purpose; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_plain_activations_match(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = (4 * torch.randn(3, 1100, generator=torch.Generator().manual_seed(7))).to(device, dtype)
    expected = getattr(reference, name)(x)
    got = getattr(activation, name)(x, out=x)
    assert got is x
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_to_do(device: torch.device) -> None:
    assert activation.gelu(torch.zeros(0, 64, device=device)).shape == (0, 64)
