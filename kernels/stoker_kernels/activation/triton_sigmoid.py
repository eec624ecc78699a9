"""`sigmoid_mul` in Triton: what attention gave, let through by its gate.

Invariants: fp32 with one rounding; rows of the gate may be strided, columns are contiguous.
Knows nothing of layers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

BLOCK, WARPS = 1024, 4


@kernel
def sigmoid_mul_kernel(x, gate, out, columns, x_stride, gate_stride, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    """Program (row, block of columns)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    open_by = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = value / (1.0 + tl.exp(-open_by))
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`op.sigmoid_mul` on CUDA."""
    if x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError("sigmoid_mul takes rows of contiguous values")
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows:
        sigmoid_mul_kernel[(rows, triton.cdiv(columns, BLOCK))](
            x, gate, out, columns, x.stride(0), gate.stride(0), BLOCK=BLOCK, num_warps=WARPS, **launch_options(x.device)
        )
    return out


for _dtype in (BF16, FP16):
    register_aot(
        sigmoid_mul_kernel,
        dict.fromkeys(("x", "gate", "out"), f"*{_dtype}")
        | dict.fromkeys(("columns", "x_stride", "gate_stride"), I32_DIVISIBLE),
        [{"BLOCK": BLOCK}],
        options={"num_warps": WARPS},
        compact=_dtype == BF16,
    )
