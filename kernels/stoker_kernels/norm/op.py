"""RMS norm, alone, with the residual addition before it, and with quantization to FP8 or integers after it.

Invariants: fp32 accumulation, one rounding to the result's dtype; the residual is rounded to its own dtype
before it is normed, so that what is normed is what is kept. Weights are of x's dtype, or fp32.
Knows nothing of models: a `1 + weight` convention is folded into the weight when it is loaded.
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

for _op in ("rms_norm", "add_rms_norm", "add_normed", "rms_norm_columns"):
    _path = f"stoker_kernels.norm.triton_rms_norm:{_op}"
    register(_op, "triton", _path, triton_supports(*_HALF_AND_FULL), invariant=True)
    if _op in ("rms_norm", "add_rms_norm"):
        register(_op, "compiled", f"stoker_kernels.norm.compiled_norm:{_op}", compiled_supports("cpu_norm"))
    register(_op, "cpu", f"stoker_kernels.norm.cpu_norm:{_op}", cpu_supports(*_HALF_AND_FULL))
    register(_op, "reference", f"stoker_kernels.norm.reference:{_op}", reference_supports)
    register_invariant(_op, "rows", f"stoker_kernels.norm.rows:{_op}", cpu_supports(*_HALF_AND_FULL))
# An op for each type that is quantized to, as not every GPU has it.
_INTO = {FP8: "", torch.int8: "_int8"}
for _function in ("rms_norm_quant", "add_rms_norm_quant"):
    for _into, _name in _INTO.items():
        _op, _least = _function + _name, 89 if _into == FP8 else 80
        _path = f"stoker_kernels.norm.triton_rms_norm:{_function}"
        register(_op, "triton", _path, triton_supports(*_HALF_AND_FULL, min_sm=_least), invariant=True)
        register(_op, "reference", f"stoker_kernels.norm.reference:{_function}", reference_supports)
        register_invariant(_op, "rows", f"stoker_kernels.norm.rows:{_function}", cpu_supports(*_HALF_AND_FULL))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`x [T,H]` → `[T,H]`: `x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich 2019). `out` may be `x`."""
    y: Tensor = select("rms_norm", x.device, x.dtype)(x, weight, eps, out=out)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`residual [T,H] += multiplier · x [T,H]` in place, then the norm of the rounded sum → `[T,H]`. `out` may be `x`.

    With `post [H]` it is x's own norm, by that weight, that is added.
    """
    y: Tensor = select("add_rms_norm", x.device, x.dtype)(
        x, residual, weight, eps, post=post, multiplier=multiplier, out=out
    )
    return y


def add_normed(x: Tensor, residual: Tensor, post: Tensor, eps: float) -> None:
    """`residual [T,H] += rms_norm(x [T,H], post [H])` in place: a layer that norms what it gives, not what it reads."""
    select("add_normed", x.device, x.dtype)(x, residual, post, eps)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, into: torch.dtype = FP8) -> Quantized:
    """`rms_norm` of `[T,H]`, then fp8 e4m3 or int8 `[T,H]` with one scale a token `[T,1]`: amax / 448, or / 127."""
    y: Quantized = select(f"rms_norm_quant{_INTO[into]}", x.device, x.dtype)(x, weight, eps, into)
    return y


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    into: torch.dtype = FP8,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
) -> Quantized:
    """`add_rms_norm`, then fp8 e4m3 or int8 `[T,H]` with one scale a token `[T,1]`, as `rms_norm_quant`."""
    y: Quantized = select(f"add_rms_norm_quant{_INTO[into]}", x.device, x.dtype)(
        x, residual, weight, eps, into, post=post, multiplier=multiplier
    )
    return y


def rms_norm_columns(x: Tensor, weights: tuple[Tensor, ...], eps: float) -> None:
    """Norm neighbouring spans of `x [T,N]`'s columns in place, each by itself: span i is as wide as `weights[i] [W]`.

    The spans begin at column 0; columns behind the last stay as they are. There are two at most.
    """
    select("rms_norm_columns", x.device, x.dtype)(x, weights, eps)
