"""`linear` on a CPU where a row's bits do not depend on the batch: host side of csrc/cpu_dot.c.

Invariants: sums are fp32, in one order for every number of tokens and threads; bias and scales are applied to them one
row at a time, and the result is rounded once. What the C function gets is contiguous and lies within its tensors.
Does not know: which layer it serves, nor how the library was compiled (`launch.cc`).
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from stoker_kernels.launch import cc
from stoker_kernels.launch.dispatch import Target, dtype_name
from stoker_kernels.quant import BLOCK, FP8, LinearWeight, Quantized, dequantize, quantize_fp8

LIBRARY = "cpu_dot"
LANES = 16
# Bytes of a weight below which a second thread costs more than it brings.
THREAD_BYTES = 128 * 1024
# Values of a quantized weight that are widened to fp32 together.
WIDENED_AT_ONCE = 1 << 24


def supports(target: Target) -> str | None:
    """Weights of bf16, fp32 and e4m3 where the C function is compiled, or can be."""
    if target.device != "cpu":
        return "needs a CPU"
    if target.dtype not in (torch.bfloat16, torch.float32, FP8):
        return f"takes bfloat16, float32, float8_e4m3fn, not {dtype_name(target.dtype)}"
    return cc.refusal(LIBRARY)


def linear(
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x · weightᵀ + bias, [T, N]; shapes as of `gemm.linear`."""
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    if weight.kind == "dense":
        assert isinstance(x, torch.Tensor), "a dense weight takes floats"
        values = x.float()
    else:
        quantized = quantize_fp8(x) if isinstance(x, torch.Tensor) else x
        values = quantized.data.float() * quantized.scale
    y = _products(values, weight)
    if bias is not None:
        y += bias.float()
    return y.to(dtype) if out is None else out.copy_(y)


def _products(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x [T, K] fp32 · weightᵀ; of a quantized weight some rows are widened at a time."""
    (tokens, columns), rows = x.shape, weight.out_features
    x = functional.pad(x, (0, -columns % LANES)).contiguous()
    y = torch.empty((tokens, rows), dtype=torch.float32)
    if weight.kind == "dense":
        _into(y, 0, x, weight.data)
        return y
    step = max(1, WIDENED_AT_ONCE // columns // BLOCK) * BLOCK
    for first in range(0, rows, step):
        _into(y, first, x, dequantize(_rows(weight, first, min(first + step, rows))))
    return y


def _rows(weight: LinearWeight, first: int, last: int) -> LinearWeight:
    """Some rows of a quantized weight; `first` is a multiple of BLOCK."""
    scale = weight.scale
    if scale is not None and weight.kind == "fp8_channel":
        scale = scale[first:last]
    elif scale is not None and weight.kind == "fp8_block":
        scale = scale[first // BLOCK : -(-last // BLOCK)]
    return LinearWeight(weight.data[first:last], scale, weight.kind)


def _into(y: torch.Tensor, first: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Columns of y from `first` on: x · weightᵀ."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    threads = torch.get_num_threads() if weight.nbytes >= THREAD_BYTES else 1
    long = ctypes.c_long
    cc.library(LIBRARY).stoker_dot_product(
        ctypes.c_void_p(weight.data_ptr()), int(weight.dtype is torch.bfloat16), long(rows), long(columns),
        ctypes.c_void_p(x.data_ptr()), long(x.shape[1]), long(len(x)), ctypes.c_void_p(y.data_ptr() + first * 4),
        long(y.shape[1]), threads,
    )  # fmt: skip
