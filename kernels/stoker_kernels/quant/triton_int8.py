"""INT8 quantization of activations in Triton: one program a token.

Invariants: the definition in `quant`, and no more than its one rounding.
Knows nothing of what made the activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant.types import INT8_MAX, MIN_SCALE

_QUANTIZED_AT_ONCE, _WARPS = 2048, 4


@kernel
def quantize_int8_kernel(
    x, data, scales, k, x_stride, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < k, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0) * (1.0 / MOST), LEAST)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < k, other=0.0).to(tl.float32) * inverse
        # Beyond 2^23 fp32 has no halves: added and taken away, 1.5 · 2^23 leaves the nearest integer, ties to even.
        rounded = (tl.clamp(value, -MOST, MOST) + 12582912.0) - 12582912.0
        tl.store(data + row * k + column, rounded.to(tl.int8), mask=column < k)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [T, K] → int8 [T, K] and fp32 scales [T, 1]."""
    m, k = x.shape
    data = torch.empty((m, k), dtype=torch.int8, device=x.device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    quantize_int8_kernel[(m,)](
        x, data, scales, k, x.stride(0), BLOCK=_QUANTIZED_AT_ONCE, MOST=INT8_MAX, LEAST=MIN_SCALE, num_warps=_WARPS,
        **launch_options(x.device),
    )  # fmt: skip
    return data, scales


def _register() -> None:
    for dtype in (BF16, FP16):
        register_aot(
            quantize_int8_kernel,
            {"x": f"*{dtype}", "data": "*i8", "scales": f"*{FP32}", "k": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE},
            [{"BLOCK": _QUANTIZED_AT_ONCE, "MOST": INT8_MAX, "LEAST": MIN_SCALE}],
            options={"num_warps": _WARPS}, min_sm=80, compact=dtype == BF16,
        )  # fmt: skip


_register()
