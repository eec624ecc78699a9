"""Activations whose result is quantized at once, in Triton: `act(gate) * up` and `act(x)`, with one scale a token.

Invariants: fp32 arithmetic with one rounding, to the type of eight bits; rows may be strided, columns are contiguous.
The one kernel holds a row in registers, because its scale is known only after the whole row. Where rows are few and
long, two kernels take pieces of them: one SM's exponentials would take longer than reading all twice.
Knows nothing of the projections around it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.activation.triton_activation import (
    CLAMPED_GELU,
    GELU,
    GELU_TANH,
    RELU2,
    SILU,
    activated_piece,
)
from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import fp8_storage, scale_of, store_rounded
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import FP8, FP8_MAX, INT8_MAX, MIN_SCALE, Quantized

MAX_COLUMNS = 65536
KINDS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu2": RELU2, "clamped_gelu": CLAMPED_GELU}
# What is quantized to: Triton's name of the type, what the largest magnitude becomes, and the least SM that has it.
_INTO = {FP8: ("fp8e4nv", FP8_MAX, 89), torch.int8: ("i8", INT8_MAX, 80)}
_SWIGLU: dict[str, int] = {"KIND": SILU, "GATED": True}
_BLOCKS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_LEAST_BLOCK = 2048  # of all but SwiGLU, whose kernels are as many as those of all others
_PIECE, _PIECE_WARPS = 2048, 8
_LONG_ROW, _FEW_ROWS = 4096, 256  # more columns than the one and at most as many rows as the other are cut into pieces
_MOST_PIECES = MAX_COLUMNS // _PIECE


@kernel
def _act_quant_kernel(
    x,
    out,
    scales,
    columns,
    x_stride,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    result, column, inside = activated_piece(x, 0, columns, x_stride, limit, KIND, GATED, BLOCK)
    # Beyond the row a gate is 0, and so is every activation of it, whatever up is.
    scale = scale_of(tl.max(tl.abs(result), axis=0), MOST, MIN_SCALE)
    store_rounded(out + row * columns + column, result * tl.div_rn(1.0, scale), inside)
    tl.store(scales + row, scale)


@kernel
def _act_max_kernel(
    x,
    largest,
    columns,
    x_stride,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """The largest magnitude of each piece of a row, `[rows, MOST_PIECES]`."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    result, _, _ = activated_piece(x, tl.program_id(1), columns, x_stride, limit, KIND, GATED, BLOCK)
    tl.store(largest + tl.program_id(0) * MOST_PIECES + tl.program_id(1), tl.max(tl.abs(result), axis=0))


@kernel
def _act_scaled_kernel(
    x,
    largest,
    out,
    scales,
    columns,
    x_stride,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
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
    result, column, inside = activated_piece(x, tl.program_id(1), columns, x_stride, limit, KIND, GATED, BLOCK)
    store_rounded(out + row * columns + column, result * tl.div_rn(1.0, scale), inside)
    if tl.program_id(1) == 0:
        tl.store(scales + row, scale)


def quantizing(x: Tensor, into: torch.dtype, activation: str, *, gated: bool, limit: float) -> Quantized:
    """`op.quantizing` on CUDA."""
    return _quantize(x, into, activation, gated, limit, in_pieces=len(x) <= _FEW_ROWS)


def quantizing_by_columns(x: Tensor, into: torch.dtype, activation: str, *, gated: bool, limit: float) -> Quantized:
    """The same by kernels that the number of rows does not choose."""
    return _quantize(x, into, activation, gated, limit, in_pieces=True)


def _quantize(
    x: Tensor, into: torch.dtype, activation: str, gated: bool, limit: float, *, in_pieces: bool
) -> Quantized:
    """`in_pieces`: long rows are cut."""
    rows, given = x.shape
    if x.stride(1) != 1 or (gated and given % 2):
        raise ValueError(f"{activation} takes rows of {'2F' if gated else 'F'} contiguous values; got {tuple(x.shape)}")
    columns = given // 2 if gated else given
    if columns > MAX_COLUMNS:
        raise ValueError(f"activations are quantized in rows of at most {MAX_COLUMNS} columns; got {columns}")
    data = torch.empty((rows, columns), dtype=into, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows == 0:
        return Quantized(data, scales)
    form: dict[str, int] = {"KIND": KINDS[activation], "GATED": gated}
    rounding = {"MOST": _INTO[into][1], "MIN_SCALE": MIN_SCALE}
    sizes, options = (columns, x.stride(0), limit or math.inf), launch_options(x.device)
    if in_pieces and columns > _LONG_ROW:
        largest = torch.empty((rows, _MOST_PIECES), dtype=torch.float32, device=x.device)
        grid = (rows, triton.cdiv(columns, _PIECE))
        pieces = form | {"BLOCK": _PIECE, "MOST_PIECES": _MOST_PIECES, "num_warps": _PIECE_WARPS} | options
        _act_max_kernel[grid](x, largest, *sizes, **pieces)
        _act_scaled_kernel[grid](x, largest, fp8_storage(data), scales, *sizes, **rounding, **pieces)
    else:
        block = max(triton.next_power_of_2(columns), _least_block(form))
        _act_quant_kernel[(rows,)](
            x, fp8_storage(data), scales, *sizes, BLOCK=block, num_warps=_warps(block), **form, **rounding, **options
        )
    return Quantized(data, scales)


def _least_block(form: dict[str, int]) -> int:
    return _BLOCKS[0] if form == _SWIGLU else _LEAST_BLOCK


def _warps(block: int) -> int:
    return max(1, min(32, block // 512))


def _register() -> None:
    integers = {"columns": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE, "limit": FP32}
    pieces = {"BLOCK": _PIECE, "MOST_PIECES": _MOST_PIECES}
    forms: list[dict[str, int]] = [{"KIND": kind, "GATED": False} for kind in (GELU, GELU_TANH, RELU2)]
    forms += [{"KIND": kind, "GATED": True} for kind in (SILU, GELU, GELU_TANH, CLAMPED_GELU)]
    for form in forms:
        swiglu = form == _SWIGLU
        for dtype in (BF16, FP16, FP32) if swiglu else (BF16, FP16):
            inputs = integers | {"x": f"*{dtype}"}
            cut = inputs | {"largest": f"*{FP32}"}
            register_aot(
                _act_max_kernel, cut, [pieces | form], options={"num_warps": _PIECE_WARPS}, min_sm=80, compact=False
            )
            for name, most, least in _INTO.values():
                out = {"out": f"*{name}", "scales": f"*{FP32}"}
                constants = form | {"MOST": most, "MIN_SCALE": MIN_SCALE}
                register_aot(
                    _act_scaled_kernel, cut | out, [pieces | constants],
                    options={"num_warps": _PIECE_WARPS}, min_sm=least, compact=swiglu and dtype == BF16,
                )  # fmt: skip
                shown = dtype == BF16 and (swiglu or name == "i8")
                for block in _BLOCKS[_BLOCKS.index(_least_block(form)) :]:
                    register_aot(
                        _act_quant_kernel, inputs | out, [constants | {"BLOCK": block}],
                        options={"num_warps": _warps(block)}, min_sm=least, compact=shown and block == 4096,
                    )  # fmt: skip


_register()
