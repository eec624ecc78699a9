"""RMS norm in Triton: one program a row, the row held in registers.

Invariants: a row is read once and written once; sums are fp32; rows may be strided, columns are contiguous.
Knows nothing of how rows are sharded.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import fp8_storage, scale_of, store_rounded
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import FP8_MAX, MIN_SCALE, Quantized

MAX_HIDDEN = 65536
_LEAST_BLOCK = 1024  # values of a row that a program holds: shorter rows take the same kernel


@kernel
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    x_stride,
    residual_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # The weight is no one's output, so it may be requested before the wait.
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + row * residual_stride + column
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(place, kept, mask=inside)
        value = kept.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * gain
    target = out + row * hidden + column
    if scales is None:
        tl.store(target, normed.to(out.dtype.element_ty), mask=inside)
    else:
        scale = scale_of(tl.max(tl.abs(normed), axis=0), FP8_MAX, MIN_SCALE)
        store_rounded(target, normed * tl.div_rn(1.0, scale), inside)
        tl.store(scales + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`norm.rms_norm` on CUDA."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`norm.add_rms_norm` on CUDA."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, residual, weight, eps, out, None)
    return out


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`norm.rms_norm_quant` on CUDA."""
    return _launch_quant(x, None, weight, eps)


def add_rms_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`norm.add_rms_norm_quant` on CUDA."""
    return _launch_quant(x, residual, weight, eps)


def _launch_quant(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Quantized:
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, eps, fp8_storage(data), scales)
    return Quantized(data, scales)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"rms_norm takes rows of at most {MAX_HIDDEN} values; got {hidden}")
    if x.stride(1) != 1 or not out.is_contiguous() or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rms_norm takes rows of contiguous values, and a contiguous out")
    if rows == 0:
        return
    block = max(_LEAST_BLOCK, triton.next_power_of_2(hidden))
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        scales,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        hidden,
        eps,
        BLOCK=block,
        FP8_MAX=FP8_MAX,
        MIN_SCALE=MIN_SCALE,
        num_warps=_warps(block),
        **launch_options(x.device),
    )


def _warps(block: int) -> int:
    """16 values a thread of 2 bytes: two 16-byte loads in flight each, and enough threads to hide one row's latency."""
    return max(1, min(16, block // 512))


def _register() -> None:
    fixed = {"eps": FP32, "hidden": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
    for dtype in (BF16, FP16, FP32):
        for block in (_LEAST_BLOCK << i for i in range(5)):
            for residual in (False, True):
                for quant in (False, True):
                    signature = fixed | {"x": f"*{dtype}", "weight": f"*{dtype}"}
                    constants: dict[str, object] = {"BLOCK": block, "FP8_MAX": FP8_MAX, "MIN_SCALE": MIN_SCALE}
                    signature["out"] = "*fp8e4nv" if quant else f"*{dtype}"
                    if quant:
                        signature["scales"] = f"*{FP32}"
                    else:
                        constants["scales"] = None
                    if residual:
                        signature |= {"residual": f"*{dtype}", "residual_stride": I32_DIVISIBLE}
                    else:
                        constants["residual"] = None
                        signature["residual_stride"] = I32
                    register_aot(
                        _rms_norm_kernel,
                        signature,
                        [constants],
                        options={"num_warps": _warps(block)},
                        min_sm=89 if quant else 75,
                        compact=dtype == BF16 and block == 4096 and residual,
                    )


_register()
