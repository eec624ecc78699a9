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
from stoker_kernels.quant import FP8, FP8_MAX, INT8_MAX, MIN_SCALE, Quantized

MAX_HIDDEN = 65536
# What results are quantized to, with Triton's name of the type.
_INTO: dict[torch.dtype | None, str] = {None: "", FP8: "fp8e4nv", torch.int8: "i8"}
_LEAST_BLOCK = 1024  # values of a row that a program holds: shorter rows take the same kernel


@kernel
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    post,
    multiplier,
    x_stride,
    residual_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # The weight is no one's output, so it may be requested before the wait.
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if post is not None:
        own = tl.load(post + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * own
    if multiplier is not None:
        value *= multiplier
    if residual is not None:
        place = residual + row * residual_stride + column
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(place, kept, mask=inside)
        value = kept.to(tl.float32)
    if weight is not None:
        normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * gain
        target = out + row * hidden + column
        if scales is None:
            tl.store(target, normed.to(out.dtype.element_ty), mask=inside)
        else:
            scale = scale_of(tl.max(tl.abs(normed), axis=0), MOST, MIN_SCALE)
            store_rounded(target, normed * tl.div_rn(1.0, scale), inside)
            tl.store(scales + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`norm.rms_norm` on CUDA."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out, None)
    return out


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
    """`norm.add_rms_norm` on CUDA."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, residual, weight, eps, out, None, post, multiplier)
    return out


def add_normed(x: Tensor, residual: Tensor, post: Tensor, eps: float) -> None:
    """`norm.add_normed` on CUDA."""
    _launch(x, residual, None, eps, None, None, post)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, into: torch.dtype) -> Quantized:
    """`norm.rms_norm_quant` on CUDA."""
    return _launch_quant(x, None, weight, eps, into)


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    into: torch.dtype,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
) -> Quantized:
    """`norm.add_rms_norm_quant` on CUDA."""
    return _launch_quant(x, residual, weight, eps, into, post, multiplier)


def _launch_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    into: torch.dtype,
    post: Tensor | None = None,
    multiplier: float = 1.0,
) -> Quantized:
    data = torch.empty(x.shape, dtype=into, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, eps, fp8_storage(data), scales, post, multiplier)
    return Quantized(data, scales)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor | None,
    scales: Tensor | None,
    post: Tensor | None = None,
    multiplier: float = 1.0,
) -> None:
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"rms_norm takes rows of at most {MAX_HIDDEN} values; got {hidden}")
    packed = out is None or out.is_contiguous()
    if x.stride(1) != 1 or not packed or (residual is not None and residual.stride(1) != 1):
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
        post,
        None if multiplier == 1.0 else multiplier,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        hidden,
        eps,
        BLOCK=block,
        MOST=INT8_MAX if out is not None and out.dtype == torch.int8 else FP8_MAX,
        MIN_SCALE=MIN_SCALE,
        num_warps=_warps(block),
        **launch_options(x.device),
    )


@kernel
def _rms_norm_columns_kernel(
    x, first, second, x_stride, first_width, second_width, eps, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    """Program (row, 0) norms the first span, (row, 1) the second."""
    is_first = tl.program_id(1) == 0
    width = tl.where(is_first, first_width, second_width)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(first + column, mask=inside & is_first, other=0.0).to(tl.float32)
    if second is not None:
        gain += tl.load(second + column, mask=inside & (tl.program_id(1) == 1), other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    place = x + tl.program_id(0).to(tl.int64) * x_stride + tl.where(is_first, 0, first_width) + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) * gain
    tl.store(place, normed.to(x.dtype.element_ty), mask=inside)


def rms_norm_columns(x: Tensor, weights: tuple[Tensor, ...], eps: float) -> None:
    """`norm.rms_norm_columns` on CUDA."""
    first, second = (*weights, None)[:2]
    widest = max(len(weight) for weight in weights)
    if len(weights) > 2 or widest > MAX_HIDDEN or x.stride(1) != 1:
        raise ValueError(f"rms_norm_columns takes one or two spans of at most {MAX_HIDDEN} contiguous values")
    if x.shape[0] == 0:
        return
    block = max(_LEAST_BLOCK, triton.next_power_of_2(widest))
    _rms_norm_columns_kernel[(x.shape[0], len(weights))](
        x, first, second, x.stride(0), len(weights[0]), 0 if second is None else len(second), eps,
        BLOCK=block, num_warps=_warps(block), **launch_options(x.device),
    )  # fmt: skip


def _warps(block: int) -> int:
    """16 values a thread of 2 bytes: two 16-byte loads in flight each, and enough threads to hide one row's latency."""
    return max(1, min(16, block // 512))


def _register() -> None:
    for dtype in (BF16, FP16, FP32):
        for block in (_LEAST_BLOCK << i for i in range(5)):
            for into in _INTO:
                _register_one(dtype, block, into, residual=False)
                _register_one(dtype, block, into, residual=True)
            if dtype == BF16:
                _register_rare(block)


def _register_one(
    dtype: str, block: int, into: torch.dtype | None, residual: bool, *, weight: str = "", post: str = "",
    multiplied: bool = False,
) -> None:  # fmt: skip
    """A kernel for weights of `dtype`, or of `weight`; with a weight of type `post` x is normed before it is added."""
    signature = {"eps": FP32, "hidden": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
    signature |= {"x": f"*{dtype}", "weight": f"*{weight or dtype}"}
    most = INT8_MAX if into == torch.int8 else FP8_MAX
    constants: dict[str, object] = {"BLOCK": block, "MOST": most, "MIN_SCALE": MIN_SCALE}
    signature["out"] = f"*{_INTO[into] or dtype}"
    optional = {
        "scales": f"*{FP32}" if into else None,
        "residual": f"*{dtype}" if residual else None,
        "post": f"*{post}" if post else None,
        "multiplier": FP32 if multiplied else None,
    }
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    constants |= {name: None for name, kind in optional.items() if kind is None}
    signature["residual_stride"] = I32_DIVISIBLE if residual else I32
    register_aot(
        _rms_norm_kernel,
        signature,
        [constants],
        options={"num_warps": _warps(block)},
        min_sm=75 if into is None else 89 if into == FP8 else 80,
        compact=dtype == BF16 and block == 4096 and residual and not (post or multiplied or weight),
    )


def _register_rare(block: int) -> None:
    """bf16 models that norm what a layer gives, scale it, or have `1 + weight` in fp32."""
    for into in _INTO:
        for weight in (BF16, FP32):
            _register_one(BF16, block, into, residual=True, weight=weight, post=weight)
        for residual in (False, True):
            _register_one(BF16, block, into, residual, weight=FP32)
        _register_one(BF16, block, into, residual=True, multiplied=True)
    register_aot(
        _rms_norm_kernel,
        {"eps": FP32, "hidden": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE, "residual_stride": I32_DIVISIBLE}
        | dict.fromkeys(("x", "residual", "post"), f"*{BF16}"),
        [{"BLOCK": block, "MOST": FP8_MAX, "MIN_SCALE": MIN_SCALE}
         | dict.fromkeys(("weight", "out", "scales", "multiplier"))],
        options={"num_warps": _warps(block)},
        compact=block == 4096,
    )  # fmt: skip
    register_aot(
        _rms_norm_columns_kernel,
        {"eps": FP32} | dict.fromkeys(("x_stride", "first_width", "second_width"), I32_DIVISIBLE)
        | dict.fromkeys(("x", "first", "second"), f"*{BF16}"),
        [{"BLOCK": block}],
        options={"num_warps": _warps(block)},
        compact=block == 4096,
    )  # fmt: skip


_register()
