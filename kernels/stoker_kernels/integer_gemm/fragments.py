"""The order of four-bit codes that the Hopper kernels read: whole fragments of mma.sync, 16 bytes a lane.

csrc/int4_fragments.cuh describes it; change both together. Where gate and up are stored in turn (the layout "pairs"), a
byte has a code of gate in its lower half and one of up in the upper half, so each is laid out by itself.

Invariants: a permutation of the half bytes of the layout "rows"; `from_fragments` undoes `to_fragments`.
Knows nothing of scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 64, 64  # of a block


def fills_blocks(rows: int, columns: int, group: int) -> bool:
    """Whether an [rows, columns] weight in groups of `group` columns can be laid out, and its scales be read.

    A step has 16 columns of one group; kernels find it by shifts.
    """
    whole = group >= columns
    return rows % ROWS == 0 and columns % COLUMNS == 0 and (whole or (group >= 16 and group & (group - 1) == 0))


def to_fragments(codes: Tensor) -> Tensor:
    """uint8 codes [N, K] → uint8 [N, K / 2] in fragment order. Raises ValueError where blocks do not fill them."""
    n, k = codes.shape
    if n % ROWS or k % COLUMNS:
        raise ValueError(f"fragments take multiples of {ROWS} rows and {COLUMNS} columns, not {n} × {k}")
    # Row 8q + 2t + h, column 16s + 8p + 2c + e of a block.
    block, q, t, h, chunk, s, p, c, e = range(9)
    split = codes.view(n // ROWS, 8, 4, 2, k // COLUMNS, 4, 2, 4, 2)
    # Half byte h + 2p + 4e of a word: the last three dimensions, slowest first, are e, p, h.
    ordered = split.permute(block, chunk, t, q, c, s, e, p, h).reshape(-1, 2)
    return (ordered[:, 0] | ordered[:, 1] << 4).view(n, k // 2)


def store_half(data: Tensor, half: int, row: int, codes: Tensor) -> None:
    """Lay out uint8 codes [R, K] of gate (half 0) or up (1), from its row `row` on, in `data` [2F, K / 2] of "pairs".

    Raises ValueError where they do not fill half a block.
    """
    (r, k), rows = codes.shape, ROWS // 2
    if r % rows or row % rows or k % COLUMNS:
        raise ValueError(f"half a block takes multiples of {rows} rows and {COLUMNS} columns, not {r} × {k} from {row}")
    block, q, t, chunk, s, p, c, e = range(8)
    split = codes.reshape(r // rows, 8, 4, k // COLUMNS, 4, 2, 4, 2)
    ordered = split.permute(block, chunk, t, q, c, s, e, p).reshape(2 * r, k // 2)
    place = data[2 * row : 2 * (row + r)]
    place.bitwise_and_(15 if half else 240).bitwise_or_(ordered << 4 * half)


def from_fragments(data: Tensor) -> Tensor:
    """uint8 [N, K / 2] in fragment order → uint8 codes [N, K]."""
    n, k = data.shape[0], data.shape[1] * 2
    halves = torch.stack([data.flatten() & 15, data.flatten() >> 4], dim=-1)
    block, chunk, t, q, c, s, e, p, h = range(9)
    split = halves.view(n // ROWS, k // COLUMNS, 4, 8, 4, 4, 2, 2, 2)
    return split.permute(block, q, t, h, chunk, s, p, c, e).reshape(n, k)
