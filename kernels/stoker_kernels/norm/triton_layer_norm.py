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


@kernel
def _layer_norm_kernel(
    x, residual, weight, bias, out, x_stride, residual_stride, hidden, eps,
    BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # Weights are no one's output, so they may be requested before the wait.
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / hidden, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / hidden + eps)
    result = centred * scale * gain + shift
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`layer_norm.layer_norm` on CUDA."""
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"layer_norm takes rows of at most {MAX_HIDDEN} values; got {hidden}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(1) != 1 or not out.is_contiguous() or (residual is not None and residual.stride(1) != 1):
        raise ValueError("layer_norm takes rows of contiguous values, and a contiguous out")
    if rows:
        block = triton.next_power_of_2(hidden)
        _layer_norm_kernel[(rows,)](
            x, residual, weight, bias, out, x.stride(0), 0 if residual is None else residual.stride(0), hidden, eps,
            BLOCK=block, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def _register() -> None:
    numbers = {"eps": FP32, "hidden": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
    for dtype in (FP16, BF16):
        tensors = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}")
        for block in (512, 1024):
            for residual in (False, True):
                added = {"residual": f"*{dtype}", "residual_stride": I32_DIVISIBLE}
                constants = {"BLOCK": block} if residual else {"BLOCK": block, "residual": None}
                register_aot(
                    _layer_norm_kernel,
                    {**numbers, **tensors, **(added if residual else {"residual_stride": I32})},
                    [constants],
                    options={"num_warps": _warps(block)},
                    compact=dtype == FP16 and block == 1024 and residual,
                )


_register()
