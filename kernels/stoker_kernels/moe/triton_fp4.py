"""Experts in MXFP4 and NVFP4 as the products of `triton_experts` read them: words of eight codes, decoded in registers.

A word's eight codes are of eight blocks of columns, so that each code place makes one small product with columns that
follow each other, under one scale a row. Codes lie in a word as `layouts/fp4_words.py` puts them: a mask brings those
of two columns to where bf16 has sign, exponent and mantissa, a constant 2^126 below their value, which their scale
makes up for. What a scale lacks then, 2^32 of MXFP4 and 2^19 of NVFP4, the sum is multiplied with once: so every value
is exact.
BLOCK, the columns that share a scale, tells the two apart: 32 and 16.
Invariants: the fp32 sum goes over the steps of a row in their order, within a step over the code places in theirs.
Knows nothing of experts, tiles and activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# What products in bf16 are short of: scales rest so much smaller.
MOVED_MXFP4, MOVED_NVFP4 = tl.constexpr(2.0**32), tl.constexpr(2.0**19)


@triton.jit
def _moved(BLOCK: tl.constexpr):
    return MOVED_NVFP4 if BLOCK == 16 else MOVED_MXFP4


@triton.jit
def step_of(step, columns, BLOCK: tl.constexpr):
    """First column, and words, of a step of a row of so many columns."""
    full = columns // (8 * BLOCK)
    rest = columns % (8 * BLOCK)
    over = step - full
    # Of the sizes in the rest the `over`-th, largest first.
    first = tl.where(rest >= 4 * BLOCK, 4 * BLOCK, tl.where(rest >= 2 * BLOCK, 2 * BLOCK, BLOCK))
    left = rest - first
    second = tl.where(left >= 2 * BLOCK, 2 * BLOCK, BLOCK)
    size = tl.where(over <= 0, first, tl.where(over == 1, second, BLOCK))
    before = tl.where(over <= 0, 0, tl.where(over == 1, first, first + second))
    start = tl.where(over < 0, step * 8 * BLOCK, full * 8 * BLOCK + before)
    return tl.multiple_of(start, BLOCK), tl.multiple_of(tl.where(over < 0, BLOCK, size // 8), BLOCK // 8)


@triton.jit
def steps_of(columns, BLOCK: tl.constexpr):
    """Steps of a row."""
    rest = columns // BLOCK % 8
    return columns // (8 * BLOCK) + rest // 4 + rest % 4 // 2 + rest % 2


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
def _scale_bits(scales, PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """The byte of a place where bf16 has what it says: an exponent, or some of its bits and of the mantissa's."""
    if BLOCK == 16:
        found = (((scales >> (8 * PLACE - 4) if PLACE else scales << 4) & 0x0FF0) | 0x7000).to(tl.int32)
    else:
        found = ((scales >> (8 * PLACE - 7) if PLACE else scales << 7) & 0x7F80).to(tl.int32)
    return found


@triton.jit
def decode(words, scales, PLACE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Codes at place 0 to 7 of words [ROWS, W], with the scales of rows [ROWS], as DTYPE.

    In bf16 they are short of their value by `_moved`.
    """
    pairs = _pairs(words, PLACE // 2)
    bits = _scale_bits(scales, PLACE, BLOCK)
    half = pairs >> 16 if PLACE % 2 else pairs & 0xFFFF
    if tl.bfloat16 == DTYPE:
        value = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        scale = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return value * scale[:, None]
    value = (half << 16).to(tl.float32, bitcast=True)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    return (value * scale[:, None] * _moved(BLOCK)).to(DTYPE)


@triton.jit
def part(
    weight, scale, x, row, source, rows, stacked, columns, x_stride, inside, WIDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight rows [ROWS] × x rows [TOKENS] → fp32 sums [ROWS, TOKENS]. `stacked`: rows that have scales together."""
    DTYPE: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, BLOCK)
    there = row < rows
    for step in range(steps_of(columns, BLOCK)):
        start, width = step_of(step, columns, BLOCK)
        words = tl.load(
            weight + row[:, None] * tl.multiple_of(columns // 8, BLOCK // 8) + (start // 8 + word)[None, :],
            mask=there[:, None] & (word < width)[None, :], other=0,
        )  # fmt: skip
        scales = tl.load(scale + step * stacked + row, mask=there, other=0)
        for place in tl.static_range(8):
            b = tl.load(
                x + source[None, :] * x_stride + (start + place * width + word)[:, None],
                mask=inside[None, :] & (word < width)[:, None], other=0.0,
            )  # fmt: skip
            sums = tl.dot(decode(words, scales, place, DTYPE, BLOCK), b.to(DTYPE), sums, input_precision="ieee")
    return sums if tl.bfloat16 != DTYPE else sums * _moved(BLOCK)


@triton.jit
def both(
    gate, gate_scale, up, up_scale, x, row, source, rows, stacked, columns, x_stride, inside,
    WIDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `part` of two weights at once, which read x together."""
    DTYPE: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    first = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    second = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    word = tl.arange(0, BLOCK)
    there = row < rows
    for step in range(steps_of(columns, BLOCK)):
        start, width = step_of(step, columns, BLOCK)
        at = row[:, None] * tl.multiple_of(columns // 8, BLOCK // 8) + (start // 8 + word)[None, :]
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
            first = tl.dot(decode(a, a_scales, place, DTYPE, BLOCK), b, first, input_precision="ieee")
            second = tl.dot(decode(c, c_scales, place, DTYPE, BLOCK), b, second, input_precision="ieee")
    if tl.bfloat16 == DTYPE:
        first, second = first * _moved(BLOCK), second * _moved(BLOCK)
    return first, second
