"""The gated RMS norm in Triton: one program a token and group, the group held in registers.

Invariants: each value is read once and written once; rows may be strided, columns are contiguous.
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

MAX_GROUP = 16384


@kernel(do_not_specialize=["weight_step"])
def gated_rms_norm_kernel(
    x, gate, weight, out, group, weight_step, x_stride, gate_stride, out_stride, eps,
    BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, group). `weight_step`: how far apart the weights of two groups lie; 0: they are the same."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < group
    gain = tl.load(weight + part * weight_step + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = tl.load(x + row * x_stride + part * group + column, mask=inside, other=0.0).to(tl.float32)
    open_by = tl.load(gate + row * gate_stride + part * group + column, mask=inside, other=0.0).to(tl.float32)
    open_by = open_by / (1.0 + tl.exp(-open_by))
    if GATE_FIRST:
        value *= open_by
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / group + eps) * gain
    if not GATE_FIRST:
        value *= open_by
    tl.store(out + row * out_stride + part * group + column, value.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group: int, gate_first: bool) -> Tensor:
    """`gated.gated_rms_norm` on CUDA."""
    if x.stride(1) != 1 or gate.stride(1) != 1 or group > MAX_GROUP:
        raise ValueError(f"gated_rms_norm takes contiguous columns, and groups of at most {MAX_GROUP}; got {group}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        block, step = triton.next_power_of_2(group), group if weight.shape[0] > group else 0
        gated_rms_norm_kernel[(x.shape[0], x.shape[1] // group)](
            x, gate, weight, out, group, step, x.stride(0), gate.stride(0), out.stride(0), eps,
            BLOCK=block, GATE_FIRST=gate_first, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


for _dtype in (BF16, FP16):
    # Heads of 64 and 128 of delta nets; groups of Mamba-2's from 512 to 8,192.
    for _block, _first in ((64, False), (128, False), *((512 << i, True) for i in range(5))):
        register_aot(
            gated_rms_norm_kernel,
            dict.fromkeys(("x", "gate", "weight", "out"), f"*{_dtype}")
            | dict.fromkeys(("group", "x_stride", "gate_stride", "out_stride"), I32_DIVISIBLE)
            | {"weight_step": I32, "eps": FP32},
            [{"BLOCK": _block, "GATE_FIRST": _first}],
            options={"num_warps": _warps(_block)},
            compact=_dtype == BF16 and _block in (128, 1024),
        )
