"""Activations in Triton: `act(gate) * up`, and `act(x)`; soft-caps.

Invariants: fp32 arithmetic with one rounding; rows may be strided, columns are contiguous.
Knows nothing of the projections around it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_GELU = 0, 1, 2, 3, 4, 5
_BLOCK = 1024


@triton.jit
def _activate(gate, KIND: tl.constexpr):
    if KIND == 0:
        result = gate * tl.sigmoid(gate)
    elif KIND == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 2:
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which has no overflow.
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == 3:
        result = tl.maximum(gate, 0.0)
    elif KIND == 4:
        result = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        result = gate * tl.sigmoid(1.702 * gate)
    return result


@triton.jit
def activated_piece(
    x, piece, columns, x_stride, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """(act(gate) · up, or act(x), of a piece of this program's row, the piece's columns, which of them there are).

    `limit` bounds gate and up of the kind that has one.
    """
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = x + tl.program_id(0).to(tl.int64) * x_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        if KIND == 5:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        result = _activate(gate, KIND) * up
    else:
        result = _activate(gate, KIND)
    return result, column, inside


@kernel
def _act_and_mul_kernel(x, out, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = activated_piece(x, tl.program_id(1), columns, x_stride, 0.0, KIND, True, BLOCK)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _clamped_gelu_kernel(x, out, columns, x_stride, limit, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = activated_piece(x, tl.program_id(1), columns, x_stride, limit, 5, True, BLOCK)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _act_kernel(x, out, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = activated_piece(x, tl.program_id(1), columns, x_stride, 0.0, KIND, False, BLOCK)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _scale_and_cap_kernel(
    x, out, columns, x_stride, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = scale * tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        # tanh(u) is 2 · sigmoid(2u) - 1, which has no overflow.
        value = cap * (2.0 * tl.sigmoid(2.0 * value / cap) - 1.0)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.silu_and_mul` on CUDA."""
    return _launch(x, out, SILU)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.gelu_and_mul` on CUDA."""
    return _launch(x, out, GELU)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.gelu_tanh_and_mul` on CUDA."""
    return _launch(x, out, GELU_TANH)


def clamped_gelu_and_mul(x: Tensor, limit: float, *, out: Tensor | None = None) -> Tensor:
    """`activation.clamped_gelu_and_mul` on CUDA."""
    rows, columns = _shape(x)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    if not out.is_contiguous():
        raise ValueError("gated activations write a contiguous out")
    if rows:
        _clamped_gelu_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            x, out, columns, x.stride(0), limit or math.inf, BLOCK=_BLOCK, **launch_options(x.device)
        )
    return out


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.silu` on CUDA."""
    return _launch_plain(x, out, SILU)


def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.gelu` on CUDA."""
    return _launch_plain(x, out, GELU)


def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.gelu_tanh` on CUDA."""
    return _launch_plain(x, out, GELU_TANH)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.relu` on CUDA."""
    return _launch_plain(x, out, RELU)


def relu2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`activation.relu2` on CUDA."""
    return _launch_plain(x, out, RELU2)


def scale_and_cap(x: Tensor, scale: float, cap: float, *, out: Tensor | None = None) -> Tensor:
    """`activation.scale_and_cap` on CUDA."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(1) != 1 or not out.is_contiguous():
        raise ValueError("scale_and_cap takes rows of contiguous values, and a contiguous out")
    if rows:
        _scale_and_cap_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            x, out, columns, x.stride(0), scale, cap, CAPPED=cap > 0, BLOCK=_BLOCK, **launch_options(x.device)
        )
    return out


def _launch_plain(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(1) != 1 or not out.is_contiguous():
        raise ValueError("activations take rows of contiguous values, and a contiguous out")
    if rows:
        _act_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            x, out, columns, x.stride(0), KIND=kind, BLOCK=_BLOCK, **launch_options(x.device)
        )
    return out


def _launch(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
    rows, columns = _shape(x)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if out is None else out
    if not out.is_contiguous():
        raise ValueError("gated activations write a contiguous out")
    if rows:
        _act_and_mul_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            x, out, columns, x.stride(0), KIND=kind, BLOCK=_BLOCK, **launch_options(x.device)
        )
    return out


def _shape(x: Tensor) -> tuple[int, int]:
    rows, both = x.shape
    if x.stride(1) != 1 or both % 2:
        raise ValueError(f"gated activations take rows of 2F contiguous values; got {tuple(x.shape)}")
    return rows, both // 2


def _register() -> None:
    integers = {"columns": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
    for dtype in (BF16, FP16, FP32):
        for kind in (SILU, GELU, GELU_TANH):
            register_aot(
                _act_and_mul_kernel,
                integers | {"x": f"*{dtype}", "out": f"*{dtype}"},
                [{"KIND": kind, "BLOCK": _BLOCK}],
                compact=dtype == BF16,
            )
        register_aot(
            _clamped_gelu_kernel,
            integers | {"x": f"*{dtype}", "out": f"*{dtype}", "limit": FP32},
            [{"BLOCK": _BLOCK}],
            compact=dtype == BF16,
        )
        for number in (I32_DIVISIBLE, I32):  # vocabularies may be odd
            register_aot(
                _scale_and_cap_kernel,
                {
                    "columns": number,
                    "x_stride": number,
                    "x": f"*{dtype}",
                    "out": f"*{dtype}",
                    "scale": FP32,
                    "cap": FP32,
                },
                [{"CAPPED": capped, "BLOCK": _BLOCK} for capped in (True, False)],
                compact=dtype == BF16,
            )
        for kind in (SILU, GELU, GELU_TANH, RELU, RELU2):
            register_aot(
                _act_kernel,
                integers | {"x": f"*{dtype}", "out": f"*{dtype}"},
                [{"KIND": kind, "BLOCK": _BLOCK}],
                compact=dtype == FP16 and kind == GELU,
            )


_register()
