"""Norms on a CPU whose rows do not depend on what is beside them: those of the CPU, one row at a time.

Invariants: those of `launch/each_row.py`; arithmetic and results as of `cpu_norm.py` and `reference.py`.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.each_row import each_row
from stoker_kernels.norm import cpu_norm, reference
from stoker_kernels.quant import Quantized

rms_norm = each_row(cpu_norm.rms_norm, "x")
add_rms_norm = each_row(cpu_norm.add_rms_norm, "x", "residual")
add_normed = each_row(cpu_norm.add_normed, "x", "residual")
rms_norm_columns = each_row(cpu_norm.rms_norm_columns, "x")
mean_squares = each_row(reference.mean_squares, "x", "gate")
rms_norm_by = each_row(reference.rms_norm_by, "x", "means", "gate")
layer_norm = each_row(reference.layer_norm, "x", "residual")
add_layer_norm = each_row(reference.add_layer_norm, "x", "residual", "also")
_rms = each_row(reference.rms, "x")
_join = each_row(reference.join, "x", "residual")


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, into: torch.dtype) -> Quantized:
    """`rms_norm`, then one scale a token."""
    return Quantized.of(_rms(x, weight, eps), into)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, into: torch.dtype, *, post: Tensor | None = None,
    multiplier: float = 1.0,
) -> Quantized:  # fmt: skip
    """`add_rms_norm`, then one scale a token."""
    _join(x, residual, eps, post, multiplier)
    return Quantized.of(_rms(residual, weight, eps), into)
