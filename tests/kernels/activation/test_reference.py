"""The references of the gated activations against torch's own modules."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import activation


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("silu_and_mul", torch.nn.SiLU()),
        ("gelu_and_mul", torch.nn.GELU()),
        ("gelu_tanh_and_mul", torch.nn.GELU(approximate="tanh")),
    ],
)
def test_activations_are_gate_first(name: str, act: torch.nn.Module) -> None:
    x = torch.randn(3, 20)
    torch.testing.assert_close(getattr(activation, name)(x), act(x[:, :10]) * x[:, 10:])
