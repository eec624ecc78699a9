"""Experts in integers of four bits as the products of `triton_experts` read them: words of eight codes, decoded in
registers.

A code place of a step's words is columns that follow each other, all of one group, so each place makes one small
product under one scale and one zero point a row. 16 bits of a word with a code in its lowest four are, with the bits of
128 (bf16) or 1,024 (fp16) or-ed in, that number plus the code, so no integer is ever converted.
Invariants: `(code - zero) · scale` is rounded once, to x's type, as `layouts/int4.py` and `integer_gemm` have it; the
fp32 sum goes over the steps of a row in their order, within a step over the code places in theirs.
Knows nothing of experts, tiles and activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.moe.triton_fp4 import step_of, steps_of


@triton.jit
def _number(bits, DTYPE: tl.constexpr):
    """What so many bits, as an integer, stand for in DTYPE; of bf16 in fp32, as far as nothing is rounded there."""
    if tl.float32 == DTYPE:
        found = bits.to(tl.int32).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        found = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found


@triton.jit
def settings_of(word, DTYPE: tl.constexpr):
    """Scale and zero point, fp32, of the words [ROWS] that hold both as numbers of DTYPE, the scale in the lower half.
    """
    HALF: tl.constexpr = 32 if tl.float32 == DTYPE else 16
    return _number(word & ((1 << HALF) - 1), DTYPE), _number((word >> HALF) & ((1 << HALF) - 1), DTYPE)


@triton.jit
def decode(words, scale, zero, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes at place 0 to 7 of words [ROWS, W], under scales and zero points [ROWS] in fp32, as DTYPE."""
    SHIFT: tl.constexpr = 4 * (PLACE // 2)
    BASE: tl.constexpr = 0 if tl.float32 == DTYPE else 128 if tl.bfloat16 == DTYPE else 1024
    if tl.float32 == DTYPE:
        codes = ((words >> (SHIFT + 16 * (PLACE % 2))) & 15).to(tl.float32)
    else:
        pairs = ((words >> SHIFT) & 0x000F000F) | (0x43004300 if tl.bfloat16 == DTYPE else 0x64006400)
        half = pairs >> 16 if PLACE % 2 else pairs & 0xFFFF
        codes = half.to(tl.uint16).to(DTYPE, bitcast=True)
    # Both the difference and its terms are small integers, exact in 16 bits.
    return (codes - (zero + BASE).to(DTYPE)[:, None]) * scale.to(DTYPE)[:, None]


@triton.jit
def _decoded(words, scale, zero, PLACE: tl.constexpr, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """As `decode`; for the interpreter, which computes in fp32, the same numbers of DTYPE in fp32."""
    if WIDEN:
        found = decode(words, scale, zero, PLACE, tl.float32).to(DTYPE).to(tl.float32)
    else:
        found = decode(words, scale, zero, PLACE, DTYPE)
    return found


@triton.jit
def part(
    weight, scale, x, row, source, rows, stacked, columns, group, x_stride, inside,
    TOGETHER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Weight rows [ROWS] × x rows [TOKENS] → fp32 sums [ROWS, TOKENS]. `stacked`: rows that have scales together;
    TOGETHER: code places of a step that share them.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, 32)
    there = row < rows
    for step in range(steps_of(columns, 32)):
        start, width = step_of(step, columns, 32)
        words = tl.load(
            weight + row[:, None] * tl.multiple_of(columns // 8, 4) + (start // 8 + word)[None, :],
            mask=there[:, None] & (word < width)[None, :], other=0,
        )  # fmt: skip
        for first in tl.static_range(0, 8, TOGETHER):
            at = (start + first * width) // group * stacked
            factor, zero = settings_of(tl.load(scale + at + row, mask=there, other=0), DTYPE)
            for place in tl.static_range(first, first + TOGETHER):
                b = tl.load(
                    x + source[None, :] * x_stride + (start + place * width + word)[:, None],
                    mask=inside[None, :] & (word < width)[:, None], other=0.0,
                )  # fmt: skip
                if WIDEN:
                    b = b.to(tl.float32)
                sums = tl.dot(_decoded(words, factor, zero, place, DTYPE, WIDEN), b, sums, input_precision="ieee")
    return sums


@triton.jit
def both(
    gate, gate_scale, up, up_scale, x, row, source, rows, stacked, columns, group, x_stride, inside,
    TOGETHER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `part` of two weights at once, which read x together."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    others = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, 32)
    there = row < rows
    for step in range(steps_of(columns, 32)):
        start, width = step_of(step, columns, 32)
        place_of = row[:, None] * tl.multiple_of(columns // 8, 4) + (start // 8 + word)[None, :]
        filled = there[:, None] & (word < width)[None, :]
        a = tl.load(gate + place_of, mask=filled, other=0)
        c = tl.load(up + place_of, mask=filled, other=0)
        for first in tl.static_range(0, 8, TOGETHER):
            at = (start + first * width) // group * stacked
            a_factor, a_zero = settings_of(tl.load(gate_scale + at + row, mask=there, other=0), DTYPE)
            c_factor, c_zero = settings_of(tl.load(up_scale + at + row, mask=there, other=0), DTYPE)
            for place in tl.static_range(first, first + TOGETHER):
                b = tl.load(
                    x + source[None, :] * x_stride + (start + place * width + word)[:, None],
                    mask=inside[None, :] & (word < width)[:, None], other=0.0,
                )  # fmt: skip
                if WIDEN:
                    b = b.to(tl.float32)
                sums = tl.dot(_decoded(a, a_factor, a_zero, place, DTYPE, WIDEN), b, sums, input_precision="ieee")
                others = tl.dot(_decoded(c, c_factor, c_zero, place, DTYPE, WIDEN), b, others, input_precision="ieee")
    return sums, others
