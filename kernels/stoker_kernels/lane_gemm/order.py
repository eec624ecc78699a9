"""Codes of sixteen rows side by side, in as many bytes as row by row.

Of sixteen rows and 32 columns there come 256 bytes of the lower half codes and, of 8 bits, 256 of the upper ones. They
are four times 16 rows × 2 columns of words, whose four half bytes are those columns of four neighbouring pairs.
Invariants: exact both ways. Rows fill sixteens, columns 32s.
Does not know: what a code means.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 16, 32
_PARTS, _PAIRS, _EACH = 4, 4, 2  # of a unit's columns: parts, pairs of each, columns of each


def to_lanes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [N, K] of `bits` bits → uint8 [N, K · bits / 8], in this order."""
    n, k = codes.shape
    planes = codes[None] if bits == 4 else torch.stack([codes & 15, codes >> 4])
    parts = planes.view(-1, n // ROWS, ROWS, k // COLUMNS, _PARTS, _PAIRS, _EACH)
    halves = parts.permute(1, 3, 0, 4, 2, 6, 5)  # group, unit, plane, part, row, column, pair
    return (halves[..., 0::2] | halves[..., 1::2] << 4).reshape(n, k * bits // 8)


def from_lanes(data: Tensor, bits: int) -> Tensor:
    """What `to_lanes` was given."""
    n, k = data.shape[0], data.shape[1] * 8 // bits
    words = data.view(n // ROWS, k // COLUMNS, bits // 4, _PARTS, ROWS, _EACH, 2)
    halves = torch.stack([words & 15, words >> 4], dim=-1).flatten(-2)
    planes = halves.permute(2, 0, 4, 1, 3, 6, 5).reshape(-1, n, k)
    return planes[0] if bits == 4 else planes[0] | planes[1] << 4
