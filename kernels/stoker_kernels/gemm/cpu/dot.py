"""`linear` on a CPU where a row's bits do not depend on the batch, by products of `launch/cpu_dot.py`.

Invariants: sums are fp32, in one order for every number of tokens and threads; bias and scales are applied to them one
row at a time, and the result is rounded once.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch

from stoker_kernels.launch import cpu_dot
from stoker_kernels.launch.dispatch import Target, dtype_name
from stoker_kernels.quant import BLOCK, FP8, LinearWeight, Quantized, dequantize, quantize_fp8

# Values of a quantized weight that are widened to fp32 together.
WIDENED_AT_ONCE = 1 << 24


def supports(target: Target) -> str | None:
    """Weights of bf16, fp32 and e4m3 where the C function is compiled, or can be."""
    if target.device != "cpu":
        return "needs a CPU"
    if target.dtype not in (torch.bfloat16, torch.float32, FP8):
        return f"takes bfloat16, float32, float8_e4m3fn, not {dtype_name(target.dtype)}"
    return cpu_dot.refusal()


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
    if weight.kind == "dense":
        return cpu_dot.dot(x, weight.data)
    (tokens, columns), rows = x.shape, weight.out_features
    x, y = cpu_dot.padded(x), torch.empty((tokens, rows), dtype=torch.float32)
    step = max(1, WIDENED_AT_ONCE // columns // BLOCK) * BLOCK
    for first in range(0, rows, step):
        cpu_dot.dot_into(y, first, x, dequantize(_rows(weight, first, min(first + step, rows))))
    return y


def _rows(weight: LinearWeight, first: int, last: int) -> LinearWeight:
    """Some rows of a quantized weight; `first` is a multiple of BLOCK."""
    scale = weight.scale
    if scale is not None and weight.kind == "fp8_channel":
        scale = scale[first:last]
    elif scale is not None and weight.kind == "fp8_block":
        scale = scale[first // BLOCK : -(-last // BLOCK)]
    return LinearWeight(weight.data[first:last], scale, weight.kind)
