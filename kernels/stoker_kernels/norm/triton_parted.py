"""Norms of spans that lie in parts, in Triton: one program a token and span, the span held in registers.

Invariants: each value is read once and written once; rows may be strided, columns are contiguous.
Knows nothing of ranks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

MAX_SPAN = 16384


@triton.jit
def _opened(x, gate, row, at, inside, x_stride, gate_stride):
    """The span's values in fp32, let through by their gate where there is one."""
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        open_by = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        value *= open_by / (1.0 + tl.exp(-open_by))
    return value


@kernel
def mean_squares_kernel(
    x, gate, means, first_width, second_width, x_stride, gate_stride, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    """Program (row, span)."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(span == 0, first_width, second_width)
    column = tl.arange(0, BLOCK)
    inside = column < width
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    value = _opened(x, gate, row, span * first_width + column, inside, x_stride, gate_stride)
    tl.store(means + row * tl.num_programs(1) + span, tl.sum(value * value, axis=0) / width)


@kernel
def rms_norm_by_kernel(
    x, gate, means, first, second, out, first_width, second_width, x_stride, gate_stride, out_stride, eps,
    BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, span)."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(span == 0, first_width, second_width)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(first + column, mask=inside & (span == 0), other=0.0).to(tl.float32)
    if second is not None:
        gain += tl.load(second + column, mask=inside & (span == 1), other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    at = span * first_width + column
    value = _opened(x, gate, row, at, inside, x_stride, gate_stride)
    value *= tl.rsqrt(tl.load(means + row * tl.num_programs(1) + span) + eps) * gain
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def mean_squares(x: Tensor, widths: Sequence[int], *, gate: Tensor | None = None) -> Tensor:
    """`parted.mean_squares` on CUDA."""
    block = _block(x, widths, gate)
    means = torch.empty((x.shape[0], len(widths)), dtype=torch.float32, device=x.device)
    if x.shape[0]:
        mean_squares_kernel[(x.shape[0], len(widths))](
            x, gate, means, widths[0], widths[-1], x.stride(0), 0 if gate is None else gate.stride(0),
            BLOCK=block, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return means


def rms_norm_by(
    x: Tensor, weights: Sequence[Tensor], means: Tensor, eps: float, *, gate: Tensor | None = None
) -> Tensor:
    """`parted.rms_norm_by` on CUDA."""
    widths = [len(weight) for weight in weights]
    block, second = _block(x, widths, gate), weights[1] if len(weights) > 1 else None
    out = x if gate is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rms_norm_by_kernel[(x.shape[0], len(widths))](
            x, gate, means, weights[0], second, out, widths[0], widths[-1], x.stride(0),
            0 if gate is None else gate.stride(0), out.stride(0), eps,
            BLOCK=block, num_warps=_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return out


def _block(x: Tensor, widths: Sequence[int], gate: Tensor | None) -> int:
    contiguous = x.stride(1) == 1 and (gate is None or gate.stride(1) == 1)
    if not contiguous or max(widths) > MAX_SPAN:
        raise ValueError(f"norms in parts take contiguous columns, and spans of at most {MAX_SPAN}; got {list(widths)}")
    return int(triton.next_power_of_2(max(widths)))


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def _register(block: int, *, gated: bool) -> None:
    """Of bf16: one span beside a gate (a part of Mamba-2's groups), or two in place (query and key heads)."""
    strides = dict.fromkeys(("first_width", "second_width", "x_stride"), I32_DIVISIBLE)
    strides["gate_stride"] = I32_DIVISIBLE if gated else I32
    given = {"x": f"*{BF16}", "means": f"*{FP32}"} | ({"gate": f"*{BF16}"} if gated else {})
    fixed: dict[str, object] = {"BLOCK": block} | ({} if gated else {"gate": None})
    options, compact = {"num_warps": _warps(block)}, block == 1024
    register_aot(mean_squares_kernel, given | strides, [fixed], options=options, compact=compact)
    given |= {"first": f"*{BF16}", "out": f"*{BF16}"} | ({} if gated else {"second": f"*{BF16}"})
    given |= strides | {"out_stride": I32_DIVISIBLE, "eps": FP32}
    others = fixed | ({"second": None} if gated else {})
    register_aot(rms_norm_by_kernel, given, [others], options=options, compact=compact)


for _size in (512 << power for power in range(4)):
    _register(_size, gated=True)
    _register(_size, gated=False)
