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
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_plain_activations_match(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = (4 * torch.randn(3, 1100, generator=torch.Generator().manual_seed(7))).to(device, dtype)
    expected = getattr(reference, name)(x)
    got = getattr(activation, name)(x, out=x)
    assert got is x
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_to_do(device: torch.device) -> None:
    assert activation.gelu(torch.zeros(0, 64, device=device)).shape == (0, 64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cap", [0.0, 2.75])
def test_soft_caps_match(cap: float, dtype: torch.dtype, device: torch.device) -> None:
    x = (4 * torch.randn(3, 1103, generator=torch.Generator().manual_seed(9))).to(device, dtype)
    x[0, 0] = 1e4  # beyond the cap by far
    expected = reference.scale_and_cap(x, 0.37, cap)
    got = activation.scale_and_cap(x, 0.37, cap, out=x)
    assert got is x
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
