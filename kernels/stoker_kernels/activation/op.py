"""Activations: gated, `act(gate) * up` of a merged gate-up projection with the gate first, and plain; soft-caps.

Invariants: fp32 arithmetic, one rounding to the result's dtype.
Knows nothing of the projection that made its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.compiled import compiled_supports
from stoker_kernels.launch.dispatch import (
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)
from stoker_kernels.quant import FP8, Quantized

_HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)

for _op in (
    *("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_gelu_and_mul"),
    *("silu", "gelu", "gelu_tanh", "relu", "relu2", "scale_and_cap"),
):
    _path = f"stoker_kernels.activation.triton_activation:{_op}"
    register(_op, "triton", _path, triton_supports(*_HALF_AND_FULL), invariant=True)
    if _op == "silu_and_mul":
        _compiled = f"stoker_kernels.activation.compiled_activation:{_op}"
        register(_op, "compiled", _compiled, compiled_supports("cpu_activation"))
    register(_op, "reference", f"stoker_kernels.activation.reference:{_op}", reference_supports)
    register_invariant(_op, "rows", f"stoker_kernels.activation.rows:{_op}", cpu_supports(*_HALF_AND_FULL))
register(
    "sigmoid_mul", "triton", "stoker_kernels.activation.triton_sigmoid:sigmoid_mul", triton_supports(*_HALF_AND_FULL)
)
register("sigmoid_mul", "reference", "stoker_kernels.activation.reference:sigmoid_mul", reference_supports)
_FOLDER = "stoker_kernels.activation"
# An op for each type that is quantized to, as not every GPU has it.
_INTO = {FP8: "quantizing_activation", torch.int8: "quantizing_activation_int8"}
for _into, _op in _INTO.items():
    _on_gpu = triton_supports(*_HALF_AND_FULL, min_sm=89 if _into == FP8 else 80)
    register(_op, "triton", f"{_FOLDER}.triton_quantizing:quantizing", _on_gpu)
    register(_op, "reference", f"{_FOLDER}.reference:quantizing", reference_supports)
    register_invariant(_op, "by_columns", f"{_FOLDER}.triton_quantizing:quantizing_by_columns", _on_gpu)
    register_invariant(_op, "rows", f"{_FOLDER}.rows:quantizing", cpu_supports(*_HALF_AND_FULL))


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `silu(x[:, :F]) * x[:, F:]` `[T,F]` (SwiGLU, Shazeer 2020)."""
    y: Tensor = select("silu_and_mul", x.device, x.dtype)(x, out=out)
    return y


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `gelu(x[:, :F]) * x[:, F:]` `[T,F]`, the exact gelu with erf."""
    y: Tensor = select("gelu_and_mul", x.device, x.dtype)(x, out=out)
    return y


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `gelu(x[:, :F]) * x[:, F:]` `[T,F]`, gelu's tanh form (Hendrycks & Gimpel 2016)."""
    y: Tensor = select("gelu_tanh_and_mul", x.device, x.dtype)(x, out=out)
    return y


def clamped_gelu_and_mul(x: Tensor, limit: float, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `g · sigmoid(1.702 · g) · (u + 1)` `[T,F]`, gelu by a sigmoid (Hendrycks & Gimpel 2016).

    g is `x[:, :F]`, at most `limit`; u is `x[:, F:]`, within ±`limit`. A limit of 0 is none.
    """
    y: Tensor = select("clamped_gelu_and_mul", x.device, x.dtype)(x, limit, out=out)
    return y


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → `x · sigmoid(x)` `[T,F]`. `out` may be `x`."""
    y: Tensor = select("silu", x.device, x.dtype)(x, out=out)
    return y


def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → the exact gelu, with erf, `[T,F]`. `out` may be `x`."""
    y: Tensor = select("gelu", x.device, x.dtype)(x, out=out)
    return y


def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → gelu's tanh form `[T,F]`. `out` may be `x`."""
    y: Tensor = select("gelu_tanh", x.device, x.dtype)(x, out=out)
    return y


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → `max(x, 0)` `[T,F]`. `out` may be `x`."""
    y: Tensor = select("relu", x.device, x.dtype)(x, out=out)
    return y


def relu2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → `max(x, 0)²` `[T,F]` (So et al. 2021). `out` may be `x`."""
    y: Tensor = select("relu2", x.device, x.dtype)(x, out=out)
    return y


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x [T,F] · sigmoid(gate [T,F])` → `[T,F]`; rows may be strided."""
    y: Tensor = select("sigmoid_mul", x.device, x.dtype)(x, gate)
    return y


def scale_and_cap(x: Tensor, scale: float, cap: float, *, out: Tensor | None = None) -> Tensor:
    """`x [T,F]` → `scale · x`, and where `cap` > 0 `cap · tanh(scale · x / cap)`, `[T,F]`. `out` may be `x`."""
    y: Tensor = select("scale_and_cap", x.device, x.dtype)(x, scale, cap, out=out)
    return y


def silu_and_mul_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`silu_and_mul` of `[T,2F]`, then e4m3 or int8 `[T,F]` with one scale a token `[T,1]`: amax / 448, or / 127.

    The activation is not rounded before it is quantized; so it is for all that follow. F is at most 65,536.
    """
    return _quantizing(x, into, "silu", gated=True)


def gelu_and_mul_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`gelu_and_mul`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "gelu", gated=True)


def gelu_tanh_and_mul_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`gelu_tanh_and_mul`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "gelu_tanh", gated=True)


def clamped_gelu_and_mul_quant(x: Tensor, limit: float, into: torch.dtype = FP8) -> Quantized:
    """`clamped_gelu_and_mul`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "clamped_gelu", gated=True, limit=limit)


def gelu_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`gelu` of `[T,F]`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "gelu", gated=False)


def gelu_tanh_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`gelu_tanh` of `[T,F]`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "gelu_tanh", gated=False)


def relu2_quant(x: Tensor, into: torch.dtype = FP8) -> Quantized:
    """`relu2` of `[T,F]`, quantized as by `silu_and_mul_quant`."""
    return _quantizing(x, into, "relu2", gated=False)


def _quantizing(x: Tensor, into: torch.dtype, activation: str, *, gated: bool, limit: float = 0.0) -> Quantized:
    y: Quantized = select(_INTO[into], x.device, x.dtype)(x, into, activation, gated=gated, limit=limit)
    return y
