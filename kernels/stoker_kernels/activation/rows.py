"""Activations on a CPU whose rows do not depend on what is beside them: the reference, one row at a time.

Invariants: those of `launch/each_row.py`; arithmetic and results as of `reference.py`.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.activation import reference
from stoker_kernels.launch.each_row import each_row
from stoker_kernels.quant import Quantized

silu_and_mul = each_row(reference.silu_and_mul, "x")
gelu_and_mul = each_row(reference.gelu_and_mul, "x")
gelu_tanh_and_mul = each_row(reference.gelu_tanh_and_mul, "x")
clamped_gelu_and_mul = each_row(reference.clamped_gelu_and_mul, "x")
silu = each_row(reference.silu, "x")
gelu = each_row(reference.gelu, "x")
gelu_tanh = each_row(reference.gelu_tanh, "x")
relu = each_row(reference.relu, "x")
relu2 = each_row(reference.relu2, "x")
scale_and_cap = each_row(reference.scale_and_cap, "x")
_activated = each_row(reference.activated, "x")


def quantizing(x: Tensor, into: torch.dtype, activation: str, *, gated: bool, limit: float) -> Quantized:
    """An activation, then one scale a token."""
    return Quantized.of(_activated(x, activation, gated=gated, limit=limit), into)
