"""Experts in MXFP4 as the products of `triton_experts` read them: words of eight codes, decoded in registers.

A word's eight codes are of eight blocks of columns, so that each code place makes one small product with columns that
follow each other, under one scale a row. Codes lie in a word as `mxfp4_layout` puts them: a mask brings those of two
columns to where bf16 has sign, exponent and mantissa, a constant 2^126 below their value, which their scale makes up
for. What a scale lacks then, 2^32, the sum is multiplied with once: so every value is exact.
Invariants: the fp32 sum goes over the steps of a row in their order, within a step over the code places in theirs.
Knows nothing of experts, tiles and activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

MOVED = tl.constexpr(2.0**32)  # what products in bf16 are short of: scales rest so much smaller


@triton.jit
def step_of(step, columns):
    """First column, and words, of a step of a row of so many columns."""
    full = columns // 256
    rest = columns % 256
    over = step - full
    # Of the sizes in the rest the `over`-th, largest first.
    first = tl.where(rest >= 128, 128, tl.where(rest >= 64, 64, 32))
    left = rest - first
    second = tl.where(left >= 64, 64, 32)
    size = tl.where(over <= 0, first, tl.where(over == 1, second, 32))
    before = tl.where(over <= 0, 0, tl.where(over == 1, first, first + second))
    start = tl.where(over < 0, step * 256, full * 256 + before)
    return tl.multiple_of(start, 32), tl.multiple_of(tl.where(over < 0, 32, size // 8), 4)


@triton.jit
def steps_of(columns):
    """Steps of a row."""
    rest = columns % 256
    return columns // 256 + rest // 128 + rest % 128 // 64 + rest % 64 // 32


@triton.jit
def _pairs(words, PLACE: tl.constexpr):
    """Two codes of each word, as the halves of 32 bits, where bf16 has them."""
    if PLACE == 0:
        found = words & -2118090304
    elif PLACE == 1:
        found = (words << 3) & -2118090304
    elif PLACE == 2:
        found = (words << 6) & -2118090304
    else:
        found = ((words << 1) & -2147450880) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
    return found


@triton.jit
def decode(words, scales, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes at place 0 to 7 of words [ROWS, W], with the scales of rows [ROWS], as DTYPE.

    In bf16 they are 1 / MOVED of their value.
    """
    pairs = _pairs(words, PLACE // 2)
    # The byte of a place where bf16 has its exponent.
    exponent = ((scales >> (8 * PLACE - 7) if PLACE else scales << 7) & 0x7F80).to(tl.int32)
    half = pairs >> 16 if PLACE % 2 else pairs & 0xFFFF
    if tl.bfloat16 == DTYPE:
        value = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        scale = exponent.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return value * scale[:, None]
    value = (half << 16).to(tl.float32, bitcast=True)
    scale = (exponent << 16).to(tl.float32, bitcast=True)
    return (value * scale[:, None] * MOVED).to(DTYPE)


@triton.jit
def part(weight, scale, x, row, source, rows, stacked, columns, x_stride, inside, WIDEN: tl.constexpr):
    """Weight rows [ROWS] × x rows [TOKENS] → fp32 sums [ROWS, TOKENS]. `stacked`: rows that have scales together."""
    DTYPE: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, 32)
    there = row < rows
    for step in range(steps_of(columns)):
        start, width = step_of(step, columns)
        words = tl.load(
            weight + row[:, None] * tl.multiple_of(columns // 8, 4) + (start // 8 + word)[None, :],
            mask=there[:, None] & (word < width)[None, :], other=0,
        )  # fmt: skip
        scales = tl.load(scale + step * stacked + row, mask=there, other=0)
        for place in tl.static_range(8):
            b = tl.load(
                x + source[None, :] * x_stride + (start + place * width + word)[:, None],
                mask=inside[None, :] & (word < width)[:, None], other=0.0,
            )  # fmt: skip
            sums = tl.dot(decode(words, scales, place, DTYPE), b.to(DTYPE), sums, input_precision="ieee")
    return sums if tl.bfloat16 != DTYPE else sums * MOVED


@triton.jit
def both(gate, gate_scale, up, up_scale, x, row, source, rows, stacked, columns, x_stride, inside, WIDEN: tl.constexpr):
    """As `part` of two weights at once, which read x together."""
    DTYPE: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    first = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    second = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, 32)
    there = row < rows
    for step in range(steps_of(columns)):
        start, width = step_of(step, columns)
        at = row[:, None] * tl.multiple_of(columns // 8, 4) + (start // 8 + word)[None, :]
        filled = there[:, None] & (word < width)[None, :]
        a = tl.load(gate + at, mask=filled, other=0)
        c = tl.load(up + at, mask=filled, other=0)
        a_scales = tl.load(gate_scale + step * stacked + row, mask=there, other=0)
        c_scales = tl.load(up_scale + step * stacked + row, mask=there, other=0)
        for place in tl.static_range(8):
            b = tl.load(
                x + source[None, :] * x_stride + (start + place * width + word)[:, None],
                mask=inside[None, :] & (word < width)[:, None], other=0.0,
            ).to(DTYPE)  # fmt: skip
            first = tl.dot(decode(a, a_scales, place, DTYPE), b, first, input_precision="ieee")
            second = tl.dot(decode(c, c_scales, place, DTYPE), b, second, input_precision="ieee")
    if tl.bfloat16 == DTYPE:
        first, second = first * MOVED, second * MOVED
    return first, second
