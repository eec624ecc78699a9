"""Integers and floats of few bits on a CPU: packed once, in their own memory, and multiplied as they lie.

Products of x in bf16 are computed in bf16 where the processor has AVX-512 BF16 (csrc/cpu_lanes.c), all others in fp32
by any processor's vectors (csrc/cpu_lanes_floats.c).
Invariants: no weight is rounded: a code less its zero point is exact, and scales are applied to the sums of 32 columns,
or of 16. What the C functions get is contiguous and lies within its tensors; sizes are checked here, for C does not.
Does not know: which layer a weight serves.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.lane_gemm.order import COLUMNS, ROWS, to_lanes
from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import Kernel, handed, operands, shared
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import Fp4Weight, IntegerWeight, unpack_rows

# Codes that are packed at a time.
PACKED_AT_ONCE = 1 << 22
# The order is that of SCALE_… in launch/csrc/cpu_lanes.h.
_FLOAT_SCALES = (torch.bfloat16, torch.float32, torch.float16)
_FP4_SCALES = {"mxfp4": 3, "nvfp4": 4}
_HALVES, _FLOATS = "cpu_lanes", "cpu_lanes_floats"
_halves_product = Kernel(_HALVES, "stoker_lanes_product")
_floats_product = Kernel(_FLOATS, "stoker_lanes_floats_product")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "factors", "bias", "x", "sums", "y")),
        *((name, ctypes.c_long) for name in ("rows", "columns", "tokens", "group", "step")),
        *((name, ctypes.c_int) for name in ("bits", "numbers", "scale_type", "wide", "threads")),
    )


def supports(target: Target) -> str | None:
    """Why nothing is multiplied so; None where it is."""
    if target.device != "cpu":
        return "needs a CPU"
    if target.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "takes bfloat16, float16, float32"
    return cc.refusal(_FLOATS)


@functools.cache
def bf16_refusal() -> str | None:
    """Why products of x in bf16 are computed in fp32; None where they are not."""
    return cc.bf16_refusal(_HALVES)


def lanes_refusal(weight: IntegerWeight | Fp4Weight) -> str | None:
    """Why a weight stays row by row; None where `pack_lanes` packs it."""
    if weight.layout != "rows" or weight.data.device.type != "cpu":
        return "it does not lie row by row on a CPU"
    if weight.out_features % ROWS or weight.in_features % COLUMNS:
        return f"rows fill no {ROWS}s, or columns no {COLUMNS}s"
    if isinstance(weight, IntegerWeight) and weight.group % COLUMNS and weight.group < weight.in_features:
        return f"groups of {weight.group} columns fill no {COLUMNS}s"
    return cc.refusal(_FLOATS)


def pack_lanes(weight: IntegerWeight | Fp4Weight) -> IntegerWeight | Fp4Weight:
    """Pack a weight in its own memory; as it is where `lanes_refusal` says why.

    Whoever held the weight as it was must not read it again.
    """
    if lanes_refusal(weight) is not None:
        return weight
    bits = weight.bits if isinstance(weight, IntegerWeight) else 4
    step = max(1, PACKED_AT_ONCE // weight.in_features // ROWS) * ROWS
    for rows in weight.data.split(step):
        rows.copy_(to_lanes(unpack_rows(rows, bits), bits))
    return replace(weight, layout="lanes")


def multiply(x: Tensor, weight: IntegerWeight | Fp4Weight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias of a packed weight [N, K] in its own order of columns: [T, K] → [T, N] of x's dtype."""
    halves = x.dtype == torch.bfloat16 and bf16_refusal() is None
    (tokens, columns), rows = x.shape, weight.out_features
    inner, y = operands(x, halves, rows, out)
    shift = None if bias is None else bias.float().contiguous()
    zeros, factors, group, bits, scale_type = _parts(weight)
    if tokens:
        threads, step = shared(tokens * columns * rows, rows // ROWS)
        sums = torch.empty(tokens * (columns // COLUMNS), dtype=torch.float32)
        work = _Work(
            weight.data.data_ptr(), weight.scale.data_ptr(), _at(zeros), _at(factors), _at(shift), inner.data_ptr(),
            sums.data_ptr(), y.data_ptr(), rows, columns, tokens, group, step, bits, isinstance(weight, Fp4Weight),
            scale_type, y.dtype == torch.float32, threads,
        )  # fmt: skip
        (_halves_product if halves else _floats_product)(work)
    return handed(y, x, out)


def _parts(weight: IntegerWeight | Fp4Weight) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """Zero points, factors of rows, columns of a group, bits, and which of the types scales have."""
    if isinstance(weight, Fp4Weight):
        return None, weight.factor, weight.block, 4, _FP4_SCALES[weight.kind]
    group = min(weight.group, weight.in_features)
    return weight.zero, None, group, weight.bits, _FLOAT_SCALES.index(weight.scale.dtype)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
