"""Rows of floats of four bits to their places in a weight that the kernels read, whatever its layout.

Invariants: rows may come in any order and number that the layout's blocks take; no other row is touched.
Knows nothing of files, nor of how codes were made.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.fragment_gemm import halves, store_half, to_fragments
from stoker_kernels.quant import Fp4Weight, unpack_rows, without_signs

EXPONENT_BIAS = 127  # of e8m0
LARGEST_EXPONENT = 160  # of a scale in fragments, as its byte has it (csrc/fp4_numbers.cuh)


def store_fp4(weight: Fp4Weight, row: int, data: Tensor, scale: Tensor, factor: Tensor | None) -> None:
    """Lay out rows from `row` on of `weight`: codes uint8 [R, K / 2], the lower column in the lower half of a byte,
    scales [K / block, R] as files have them, and a factor, one or [R].

    Rows count gate before up. Raises ValueError for rows that do not fill the blocks of the layout, and for scales that
    its kernels do not take.
    """
    last = row + len(data)
    if weight.layout == "rows":
        weight.data[row:last].copy_(data)
        _store_groups(weight, slice(row, last), scale, factor)
        return
    codes = unpack_rows(data, 4)
    if weight.kind == "nvfp4":
        codes, wide = without_signs(codes, scale.t())
        scale = wide.t()
    elif (largest := int(scale.max())) > LARGEST_EXPONENT:
        most = LARGEST_EXPONENT - EXPONENT_BIAS
        raise ValueError(f"has a scale of 2^{largest - EXPONENT_BIAS}; the largest that is multiplied is 2^{most}")
    if weight.layout == "fragments":
        weight.data[row:last].copy_(to_fragments(codes, "fp4"))
        _store_groups(weight, slice(row, last), scale, factor)
        return
    for which, part, start, places in halves(row, len(data), weight.out_features):
        store_half(weight.data, which, start, codes[part], "fp4")
        of_part = factor[part] if factor is not None and factor.numel() > 1 else factor
        _store_groups(weight, places, scale[:, part], of_part)


def _store_groups(weight: Fp4Weight, rows: slice, scale: Tensor, factor: Tensor | None) -> None:
    weight.scale[:, rows].copy_(scale)
    if weight.factor is not None and factor is not None:
        weight.factor[rows] = factor
