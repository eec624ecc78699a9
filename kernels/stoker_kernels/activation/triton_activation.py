"""Activations in Triton: `act(gate) * up`, the same with FP8 quantization, and `act(x)`.

Invariants: fp32 arithmetic with one rounding; rows may be strided, columns are contiguous. The quantizing kernel
holds a row in registers, because its scale is known only after the whole row. Where rows are few and long, two kernels
take pieces of them: one SM's exponentials would take longer than reading all twice.
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
from stoker_kernels.launch.triton_fp8 import fp8_storage, scale_of, store_rounded
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import FP8, FP8_MAX, INT8_MAX, MIN_SCALE, Quantized

SILU, GELU, GELU_TANH, RELU, RELU2 = 0, 1, 2, 3, 4
# What is quantized to: Triton's name of the type, what the largest magnitude becomes, and the least SM that has it.
_INTO = {FP8: ("fp8e4nv", FP8_MAX, 89), torch.int8: ("i8", INT8_MAX, 80)}
MAX_QUANT_COLUMNS = 65536
_BLOCK = 1024
_PIECE, _PIECE_WARPS = 2048, 8
_LONG_ROW, _FEW_ROWS = 4096, 256  # more columns than the one and at most as many rows as the other are cut into pieces
_MOST_PIECES = MAX_QUANT_COLUMNS // _PIECE


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
    else:
        result = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    return result


@triton.jit
def _gated_piece(x, piece, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """(act(gate) · up of a piece of this program's row, the piece's columns, which of them there are)."""
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = x + tl.program_id(0).to(tl.int64) * x_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    return _activate(gate, KIND) * up, column, inside


@kernel
def _act_and_mul_kernel(x, out, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = _gated_piece(x, tl.program_id(1), columns, x_stride, KIND, BLOCK)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _clamped_gelu_kernel(x, out, columns, x_stride, limit, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = x + row * x_stride + column
    gate = tl.minimum(tl.load(source, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    result = gate * tl.sigmoid(1.702 * gate) * up
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _act_kernel(x, out, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, _activate(value, KIND).to(out.dtype.element_ty), mask=inside)


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


@kernel
def _silu_and_mul_quant_kernel(
    x,
    out,
    scales,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = _gated_piece(x, 0, columns, x_stride, KIND=0, BLOCK=BLOCK)
    scale = scale_of(tl.max(tl.abs(result), axis=0), MOST, MIN_SCALE)
    store_rounded(out + row * columns + column, result * tl.div_rn(1.0, scale), inside)
    tl.store(scales + row, scale)


@kernel
def _silu_and_mul_max_kernel(
    x, largest, columns, x_stride, BLOCK: tl.constexpr, MOST_PIECES: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    """The largest magnitude of each piece of a row, `[rows, MOST_PIECES]`."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    result, _, _ = _gated_piece(x, tl.program_id(1), columns, x_stride, KIND=0, BLOCK=BLOCK)
    tl.store(largest + tl.program_id(0) * MOST_PIECES + tl.program_id(1), tl.max(tl.abs(result), axis=0))


@kernel
def _silu_and_mul_scaled_kernel(
    x,
    largest,
    out,
    scales,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    MOST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, MOST_PIECES)
    of_pieces = tl.load(largest + row * MOST_PIECES + piece, mask=piece < tl.num_programs(1), other=0.0)
    scale = scale_of(tl.max(of_pieces, axis=0), MOST, MIN_SCALE)
    result, column, inside = _gated_piece(x, tl.program_id(1), columns, x_stride, KIND=0, BLOCK=BLOCK)
    store_rounded(out + row * columns + column, result * tl.div_rn(1.0, scale), inside)
    if tl.program_id(1) == 0:
        tl.store(scales + row, scale)


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


def silu_and_mul_quant(x: Tensor, into: torch.dtype) -> Quantized:
    """`activation.silu_and_mul_quant` on CUDA."""
    return _silu_and_mul_quant(x, into, in_pieces=len(x) <= _FEW_ROWS)


def silu_and_mul_quant_by_columns(x: Tensor, into: torch.dtype) -> Quantized:
    """The same by kernels that the number of rows does not choose."""
    return _silu_and_mul_quant(x, into, in_pieces=True)


def _silu_and_mul_quant(x: Tensor, into: torch.dtype, *, in_pieces: bool) -> Quantized:
    """`in_pieces`: long rows are cut."""
    rows, columns = _shape(x)
    if columns > MAX_QUANT_COLUMNS:
        raise ValueError(f"silu_and_mul_quant takes at most {MAX_QUANT_COLUMNS} columns; got {columns}")
    data = torch.empty((rows, columns), dtype=into, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows == 0:
        return Quantized(data, scales)
    if in_pieces and columns > _LONG_ROW:
        _quantize_pieces(x, data, scales)
        return Quantized(data, scales)
    block = triton.next_power_of_2(columns)
    _silu_and_mul_quant_kernel[(rows,)](
        x,
        fp8_storage(data),
        scales,
        columns,
        x.stride(0),
        BLOCK=block,
        MOST=_INTO[into][1],
        MIN_SCALE=MIN_SCALE,
        num_warps=_quant_warps(block),
        **launch_options(x.device),
    )
    return Quantized(data, scales)


def _quantize_pieces(x: Tensor, data: Tensor, scales: Tensor) -> None:
    rows, columns = data.shape
    largest = torch.empty((rows, _MOST_PIECES), dtype=torch.float32, device=x.device)
    grid, options = (rows, triton.cdiv(columns, _PIECE)), launch_options(x.device)
    pieces = {"BLOCK": _PIECE, "MOST_PIECES": _MOST_PIECES, "num_warps": _PIECE_WARPS}
    _silu_and_mul_max_kernel[grid](x, largest, columns, x.stride(0), **pieces, **options)
    _silu_and_mul_scaled_kernel[grid](
        x, largest, fp8_storage(data), scales, columns, x.stride(0), MOST=_INTO[data.dtype][1], MIN_SCALE=MIN_SCALE,
        **pieces, **options,
    )  # fmt: skip


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


def _quant_warps(block: int) -> int:
    return max(1, min(32, block // 512))


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
        pieces = {"BLOCK": _PIECE, "MOST_PIECES": _MOST_PIECES}
        inputs = integers | {"x": f"*{dtype}", "largest": f"*{FP32}"}
        register_aot(
            _silu_and_mul_max_kernel, inputs, [pieces], options={"num_warps": _PIECE_WARPS}, min_sm=80, compact=False
        )
        for name, most, least in _INTO.values():
            out, constants = {"out": f"*{name}", "scales": f"*{FP32}"}, {"MOST": most, "MIN_SCALE": MIN_SCALE}
            register_aot(
                _silu_and_mul_scaled_kernel, inputs | out, [pieces | constants],
                options={"num_warps": _PIECE_WARPS}, min_sm=least, compact=dtype == BF16,
            )  # fmt: skip
            for block in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
                register_aot(
                    _silu_and_mul_quant_kernel, integers | {"x": f"*{dtype}"} | out, [constants | {"BLOCK": block}],
                    options={"num_warps": _quant_warps(block)}, min_sm=least, compact=dtype == BF16 and block == 4096,
                )  # fmt: skip


_register()
