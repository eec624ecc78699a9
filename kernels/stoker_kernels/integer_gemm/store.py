"""Rows of integers to their places in a weight that the kernels read, whatever its layout.

Invariants: rows may come in any order and number that the layout's blocks take; no other row is touched.
Knows nothing of files, nor of how codes were made.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.fragment_gemm import halves, store_half, to_fragments
from stoker_kernels.quant import IntegerWeight, pack_rows


def store_integers(weight: IntegerWeight, row: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Lay out rows from `row` on of `weight`: uint8 codes [R, K], scales and zero points [G, R], None: the middle.

    Rows count gate before up. Raises ValueError for rows that do not fill the blocks of the layout.
    """
    if weight.layout != "pairs":
        rows = slice(row, row + len(codes))
        laid_out = weight.layout == "fragments"
        weight.data[rows].copy_(to_fragments(codes, weight.kind) if laid_out else pack_rows(codes, weight.bits))
        _store_groups(weight, rows, scale, zero)
        return
    for which, part, start, places in halves(row, len(codes), weight.out_features):
        store_half(weight.data, which, start, codes[part], weight.kind)
        _store_groups(weight, places, scale[:, part], None if zero is None else zero[:, part])


def _store_groups(weight: IntegerWeight, rows: slice, scale: Tensor, zero: Tensor | None) -> None:
    weight.scale[:, rows].copy_(scale)
    if weight.zero is not None:
        weight.zero[:, rows] = weight.middle if zero is None else zero
