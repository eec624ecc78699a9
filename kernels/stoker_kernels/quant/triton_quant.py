"""FP8 quantization of activations in Triton: one program a token.

Invariants: bit for bit the definition in `quant`. A row of up to MAX_BLOCK values is held in registers, as it came; a
longer one, and where there are many rows one of more than MANY_ROWS_BLOCK, is read twice (the second time from L2).
Knows nothing of what made the activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import fp8_storage, scale_of, store_rounded
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant.types import FP8_MAX, MIN_SCALE, Quantized

MIN_BLOCK, MANY_ROWS_BLOCK, MAX_BLOCK = 1024, 8192, 32768
FEW_ROWS = 256  # up to here a row is one read; beyond, registers for it cost more than they save (H200, 18,944 columns)


@triton.jit
def _largest_magnitude(value):
    """The largest |value|, as fp32, by integers: the bits of magnitudes have their order, and no value is widened."""
    if value.dtype.primitive_bitwidth == 16:
        bits = tl.max((value.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), axis=0).to(tl.int16)
    else:
        bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    return bits.to(value.dtype, bitcast=True).to(tl.float32)


@kernel
def _quantize_fp8_kernel(
    x,
    out,
    scales,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_stride
    column = tl.arange(0, BLOCK)
    value = tl.load(source + column, mask=column < columns, other=0.0)
    largest = _largest_magnitude(value)
    if not HELD:
        for start in range(BLOCK, columns, BLOCK):
            inside = start + column < columns
            largest = tl.maximum(largest, _largest_magnitude(tl.load(source + start + column, mask=inside, other=0.0)))
    scale = scale_of(largest, FP8_MAX, MIN_SCALE)
    inverse = tl.div_rn(1.0, scale)
    target = out + row * columns + column
    store_rounded(target, value.to(tl.float32) * inverse, column < columns)
    if not HELD:
        for start in range(BLOCK, columns, BLOCK):
            inside = start + column < columns
            more = tl.load(source + start + column, mask=inside, other=0.0).to(tl.float32)
            store_rounded(target + start, more * inverse, inside)
    tl.store(scales + row, scale)


def quantize_fp8(x: Tensor) -> Quantized:
    """`quant.quantize_fp8` on CUDA."""
    rows, columns = x.shape
    if x.stride(1) != 1:
        raise ValueError("quantize_fp8 takes rows of contiguous values")
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        most = MAX_BLOCK if rows <= FEW_ROWS else MANY_ROWS_BLOCK
        block = max(MIN_BLOCK, min(most, triton.next_power_of_2(columns)))
        _quantize_fp8_kernel[(rows,)](
            x, fp8_storage(data), scales, columns, x.stride(0), BLOCK=block, HELD=columns <= block, FP8_MAX=FP8_MAX,
            MIN_SCALE=MIN_SCALE, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return Quantized(data, scales)


def _warps(block: int) -> int:
    return min(16, block // 512)


def _register() -> None:
    blocks = [MIN_BLOCK << i for i in range((MAX_BLOCK // MIN_BLOCK).bit_length())]
    for dtype in (BF16, FP16, FP32):
        for block, held in (*((block, True) for block in blocks), (MANY_ROWS_BLOCK, False), (MAX_BLOCK, False)):
            register_aot(
                _quantize_fp8_kernel,
                {"x": f"*{dtype}", "out": "*fp8e4nv", "scales": f"*{FP32}", "columns": I32_DIVISIBLE,
                 "x_stride": I32_DIVISIBLE},
                [{"BLOCK": block, "HELD": held, "FP8_MAX": FP8_MAX, "MIN_SCALE": MIN_SCALE}],
                options={"num_warps": _warps(block)},
                min_sm=89,
                compact=dtype == BF16 and (block in (4096, MAX_BLOCK) and held),
            )


_register()
