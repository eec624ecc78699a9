"""What stands between a feed-forward's products, of every activation, for a product of floats and of eight bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from stoker_kernels.quant import FP8, Quantized
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.layers.activation import Activation

RANDOM = random.Random()
LIMIT = RANDOM.uniform(0.3, 2.0)
PLAIN = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x) ** 2,
}


def wanted(activation: str, gated: bool, x: torch.Tensor) -> torch.Tensor:
    """The activation, in fp32, by torch's own."""
    if not gated:
        return PLAIN[activation](x.float())
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "clamped_gelu":
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-LIMIT, LIMIT) + 1)
    return PLAIN[activation](gate) * up


@pytest.mark.parametrize("into", [None, FP8, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("activation", "gated"),
    [("clamped_gelu", True), *((name, True) for name in PLAIN if name != "relu2"), *((name, False) for name in PLAIN)],
)
def test_each_is_quantized_for_a_product_that_reads_so(
    activation: str, gated: bool, into: torch.dtype | None
) -> None:
    spec = build_spec(read_source("shape:tiny"))
    act = Activation(replace(spec, activation=activation, gated=gated, activation_limit=LIMIT))
    assert act.swiglu == (activation == "silu" and gated)
    x = 2 * torch.randn(RANDOM.randrange(1, 6), 2 * RANDOM.randrange(1, 80)).to(torch.bfloat16)
    got, expected = act(x, into), wanted(activation, gated, x)
    if into is None or (activation == "silu" and not gated):  # of no model: its product quantizes by itself
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-5)
        return
    assert isinstance(got, Quantized)
    exact = Quantized.of(expected, into)
    torch.testing.assert_close(got.scale, exact.scale)
    step = 0.126 * exact.data.float().abs() + 2**-9 if into == FP8 else torch.ones(())
    assert bool(((got.data.float() - exact.data.float()).abs() <= step).all())
