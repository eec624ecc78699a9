"""Experts in integers of eight bits as the products of `triton_experts` read them: bytes, decoded in registers.

A step is columns of one group, so it has one scale and one zero point a row. Where activations are integers, too
(`product`, `products`), the tensor cores multiply and add integers, and scales come after.
Invariants: `(code - zero) · scale` is rounded once, to x's type: the difference is a whole number that 16 bits hold, or
fp32 does before it is multiplied. The fp32 sum goes over the steps of a row in their order.
Knows nothing of experts, tiles and activations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.moe.triton_int4 import settings_of


@triton.jit
def _decoded(codes, scale, zero, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """Codes [ROWS, K] under scales and zero points [ROWS] in fp32, as DTYPE; for the interpreter those in fp32."""
    found = ((codes.to(tl.float32) - zero[:, None]) * scale[:, None]).to(DTYPE)
    if WIDEN:
        found = found.to(tl.float32)
    return found


@triton.jit
def part(
    weight, scale, x, row, source, rows, stacked, columns, group, x_stride, inside,
    K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Weight rows [ROWS] × x rows [TOKENS] → fp32 sums [ROWS, TOKENS]. `stacked`: rows that have scales together."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    there = row < rows
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        codes = tl.load(
            weight + row[:, None] * columns + column[None, :],
            mask=there[:, None] & (column[None, :] < columns), other=0,
        )  # fmt: skip
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0.0,
        )  # fmt: skip
        at = start // group * stacked
        factor, zero = settings_of(tl.load(scale + at + row, mask=there, other=0), DTYPE)
        if WIDEN:
            b = b.to(tl.float32)
        sums = tl.dot(_decoded(codes, factor, zero, DTYPE, WIDEN), b, sums, input_precision="ieee")
    return sums


@triton.jit
def both(
    gate, gate_scale, up, up_scale, x, row, source, rows, stacked, columns, group, x_stride, inside,
    K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `part` of two weights at once, which read x together."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    others = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    there = row < rows
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        place = row[:, None] * columns + column[None, :]
        filled = there[:, None] & (column[None, :] < columns)
        a = tl.load(gate + place, mask=filled, other=0)
        c = tl.load(up + place, mask=filled, other=0)
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0.0,
        )  # fmt: skip
        at = start // group * stacked
        a_factor, a_zero = settings_of(tl.load(gate_scale + at + row, mask=there, other=0), DTYPE)
        c_factor, c_zero = settings_of(tl.load(up_scale + at + row, mask=there, other=0), DTYPE)
        if WIDEN:
            b = b.to(tl.float32)
        sums = tl.dot(_decoded(a, a_factor, a_zero, DTYPE, WIDEN), b, sums, input_precision="ieee")
        others = tl.dot(_decoded(c, c_factor, c_zero, DTYPE, WIDEN), b, others, input_precision="ieee")
    return sums, others


@triton.jit
def product(weight, x, row, source, rows, columns, x_stride, inside, K: tl.constexpr):
    """Weight rows [ROWS] × x rows [TOKENS], int8 both → their sums [ROWS, TOKENS], added as int32, in fp32."""
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.int32)
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        a = tl.load(
            weight + row[:, None] * columns + column[None, :],
            mask=(row[:, None] < rows) & (column[None, :] < columns), other=0,
        )  # fmt: skip
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0,
        )  # fmt: skip
        sums += tl.dot(a, b, out_dtype=tl.int32)
    return sums.to(tl.float32)


@triton.jit
def products(gate, up, x, row, source, rows, columns, x_stride, inside, K: tl.constexpr):
    """As `product` of two weights at once, which read x together."""
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.int32)
    others = tl.zeros((row.shape[0], source.shape[0]), tl.int32)
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        filled = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None] * columns + column[None, :]
        a = tl.load(gate + place, mask=filled, other=0)
        c = tl.load(up + place, mask=filled, other=0)
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0,
        )  # fmt: skip
        sums += tl.dot(a, b, out_dtype=tl.int32)
        others += tl.dot(c, b, out_dtype=tl.int32)
    return sums.to(tl.float32), others.to(tl.float32)
