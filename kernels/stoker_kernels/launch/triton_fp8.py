"""fp32 → fp8 e4m3 inside Triton kernels, on every SM, and back, and the scale of values that are quantized together.

Invariants: rounds to nearest even and saturates at ±448, bit for bit what torch's conversion of the clamped value
gives. SM 8.9 and newer convert by instruction; older ones, which refuse the fp8 type even for stores, and Triton's
interpreter, whose own conversion rounds wrongly, go by integer arithmetic and store bytes.
Knows nothing of which values share a scale.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_of


def native_fp8(device: torch.device) -> bool:
    """Whether kernels on `device` convert by instruction and store fp8; otherwise they store its bytes."""
    return chip_of(sm_of(device)).fp8


def fp8_storage(tensor: Tensor) -> Tensor:
    """What to pass to a kernel for a tensor it writes: fp8 as bytes where the device refuses the type."""
    if tensor.dtype == torch.float8_e4m3fn and not native_fp8(tensor.device):
        return tensor.view(torch.uint8)
    return tensor


@triton.jit
def e4m3_bits(x):
    """The e4m3 code of fp32 `x`, as uint8."""
    # e4m3 keeps 3 of fp32's 23 mantissa bits: add half of the 20 dropped ones (ties to even), then shift and
    # rebias the exponent from 127 to 7. Below 2^-6 the codes are multiples of 2^-9, fp32's unit at 2^14.
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def e4m3_values(bits, DTYPE: tl.constexpr):
    """What e4m3 codes of type uint8 stand for, in a float type of 16 or 32 bits, exactly; of NaN 480.

    Its exponent and mantissa, put where that type has its own, are short of the value by the difference of both biases
    alone, subnormals included.
    """
    if tl.float16 == DTYPE:
        wide = bits.to(tl.uint16)
        value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    elif tl.bfloat16 == DTYPE:
        wide = bits.to(tl.uint16)
        value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * 2.0**120
    else:
        wide = bits.to(tl.uint32)
        value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return value.to(DTYPE)


@triton.jit
def store_rounded(pointer, value, mask):
    """Store fp32 `value` in the pointer's type; uint8 means the bytes of e4m3, int8 integers within ±127."""
    if pointer.dtype.element_ty == tl.uint8:
        tl.store(pointer, e4m3_bits(value), mask=mask)
    elif pointer.dtype.element_ty == tl.float8e4nv:
        # Without the clamp an infinity would become NaN.
        tl.store(pointer, tl.clamp(value, -448.0, 448.0).to(tl.float8e4nv), mask=mask)
    elif pointer.dtype.element_ty == tl.int8:
        # Beyond 2^23 fp32 has no halves: added and taken away, 1.5 · 2^23 leaves the nearest integer, ties to even.
        rounded = (tl.clamp(value, -127.0, 127.0) + 12582912.0) - 12582912.0
        tl.store(pointer, rounded.to(tl.int8), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def scale_of(largest, MOST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """The scale of values whose largest magnitude is `largest` and becomes MOST, as `quant` defines it."""
    return tl.maximum(largest * (1.0 / MOST), MIN_SCALE)
