"""Layer norm in Triton: one program a row, the row held in registers.

Invariants: a row is read once and written once; sums are fp32; rows may be strided, columns are contiguous.
Knows nothing of models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

MAX_HIDDEN = 65536
_LEAST_BLOCK = 512  # values of a row that a program holds: shorter rows take the same kernel


@kernel
def _layer_norm_kernel(
    x, also, residual, weight, bias, out, x_stride, residual_stride, hidden, eps,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """KEEP writes the sum to `residual`, and norms what it wrote."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # Weights are no one's output, so they may be requested before the wait.
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if also is not None:
        value += tl.load(also + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + row * residual_stride + column
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            kept = value.to(residual.dtype.element_ty)
            tl.store(place, kept, mask=inside)
            value = kept.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / hidden, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / hidden + eps)
    result = centred * scale * gain
    if bias is not None:
        result += shift
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`layer_norm.layer_norm` on CUDA."""
    return _launch(x, None, residual, weight, bias, eps, out, keep=False)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    also: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`layer_norm.add_layer_norm` on CUDA."""
    return _launch(x, also, residual, weight, bias, eps, out, keep=True)


def _launch(
    x: Tensor,
    also: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    *,
    keep: bool,
) -> Tensor:
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"layer_norm takes rows of at most {MAX_HIDDEN} values; got {hidden}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(1) != 1 or not out.is_contiguous() or (residual is not None and residual.stride(1) != 1):
        raise ValueError("layer_norm takes rows of contiguous values, and a contiguous out")
    if also is not None and not also.is_contiguous():
        raise ValueError("layer_norm adds a second update that is contiguous")
    if rows:
        block = max(_LEAST_BLOCK, triton.next_power_of_2(hidden))
        _layer_norm_kernel[(rows,)](
            x, also, residual, weight, bias, out, x.stride(0), 0 if residual is None else residual.stride(0), hidden,
            eps, KEEP=keep, BLOCK=block, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def _register() -> None:
    for dtype in (FP16, BF16):
        for block in (_LEAST_BLOCK << i for i in range(2)):
            for residual in (False, True):
                _register_one(dtype, block, dtype, residual=residual)
        for block in (_LEAST_BLOCK << i for i in range(1, 6)):
            # Decoders: the stream is kept, a second branch may be added, the bias be left out or the weight in fp32.
            for also in (False, True):
                for bias in (False, True):
                    _register_one(dtype, block, dtype, residual=True, keep=True, also=also, bias=bias)
            _register_one(dtype, block, dtype, residual=False, bias=False)
            if block > 2 * _LEAST_BLOCK:
                _register_one(dtype, block, dtype, residual=False)
            if dtype == BF16:
                _register_one(dtype, block, FP32, residual=False)
                _register_one(dtype, block, FP32, residual=True, keep=True)


def _register_one(
    dtype: str, block: int, weight: str, *, residual: bool, keep: bool = False, also: bool = False, bias: bool = True
) -> None:
    signature = {"eps": FP32, "hidden": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
    signature["residual_stride"] = I32_DIVISIBLE if residual else I32
    signature |= {"x": f"*{dtype}", "out": f"*{dtype}", "weight": f"*{weight}"}
    optional = {
        "also": f"*{dtype}" if also else None,
        "residual": f"*{dtype}" if residual else None,
        "bias": f"*{dtype}" if bias else None,
    }
    signature |= {name: kind for name, kind in optional.items() if kind is not None}
    constants = {name: None for name, kind in optional.items() if kind is None}
    register_aot(
        _layer_norm_kernel,
        signature,
        [{"BLOCK": block, "KEEP": keep, **constants}],
        options={"num_warps": _warps(block)},
        compact=dtype == FP16 and block == 1024 and residual and (keep == also) and bias,
    )


_register()
