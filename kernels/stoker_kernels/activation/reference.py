"""Activations, plain and gated, in plain PyTorch: oracle and CPU backend.

Invariants: the signatures are those of the public ops; arithmetic is fp32 with one rounding, at the end, to the dtype
of the result.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.quant import Quantized

GELU_SLOPE = 1.702  # of the sigmoid that is nearest to gelu's


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return deliver(functional.silu(gate) * up, x.dtype, out)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the exact (erf) gelu, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return deliver(functional.gelu(gate) * up, x.dtype, out)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the tanh approximation, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return deliver(functional.gelu(gate, approximate="tanh") * up, x.dtype, out)


def clamped_gelu_and_mul(x: Tensor, limit: float, *, out: Tensor | None = None) -> Tensor:
    """gelu by a sigmoid, times up + 1, of values within `limit`."""
    gate, up = x.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return deliver(gate * torch.sigmoid(GELU_SLOPE * gate) * (up + 1.0), x.dtype, out)


def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The exact (erf) gelu."""
    return deliver(functional.gelu(x.float()), x.dtype, out)


def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu by its tanh approximation."""
    return deliver(functional.gelu(x.float(), approximate="tanh"), x.dtype, out)


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x · sigmoid(x)`."""
    return deliver(functional.silu(x.float()), x.dtype, out)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`max(x, 0)`."""
    return deliver(functional.relu(x.float()), x.dtype, out)


def relu2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`max(x, 0)²`."""
    return deliver(functional.relu(x.float()).square(), x.dtype, out)


def scale_and_cap(x: Tensor, scale: float, cap: float, *, out: Tensor | None = None) -> Tensor:
    """`scale · x`, soft-capped where there is a cap."""
    value = x.float() * scale
    return deliver(torch.tanh(value / cap) * cap if cap > 0 else value, x.dtype, out)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x · sigmoid(gate)`."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def activated(x: Tensor, activation: str, *, gated: bool, limit: float) -> Tensor:
    """Any activation by its name, in fp32."""
    if activation == "clamped_gelu":
        return clamped_gelu_and_mul(x.float(), limit)
    known = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul} if gated else {
        "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2
    }  # fmt: skip
    return known[activation](x.float())


def quantizing(x: Tensor, into: torch.dtype, activation: str, *, gated: bool, limit: float) -> Quantized:
    """An activation, then one scale a token."""
    return Quantized.of(activated(x, activation, gated=gated, limit=limit), into)
