"""The order of codes of 4 and 8 bits that the Hopper kernels read: whole fragments of mma.sync, 16 bytes a lane.

csrc/fragments.cuh describes it, csrc/fp4_numbers.cuh the bits of floats; change them together. Where gate and up are
stored in turn (the layout "pairs"), each is laid out by itself: a word has bits of gate and bits of up.

Invariants: `from_fragments` undoes `to_fragments`, and rows of a half touch no bit of the other half.
Knows nothing of scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from stoker_kernels.quant import field_mask, place_codes, placed_codes

CodeForm = Literal["int4", "int8", "fp4"]
ROWS, COLUMNS = 64, 64  # of a block
GROUP = 16  # columns of a step, which has one group's


def fills_blocks(rows: int, columns: int, group: int) -> bool:
    """Whether an [rows, columns] weight in groups of `group` columns can be laid out, and its scales be read.

    A step has 16 columns of one group; kernels find it by shifts.
    """
    whole = group >= columns
    return rows % ROWS == 0 and columns % COLUMNS == 0 and (whole or (group >= GROUP and group & (group - 1) == 0))


def to_fragments(codes: Tensor, form: CodeForm) -> Tensor:
    """uint8 codes [N, K] → uint8 [N, K / 2], of 8 bits [N, K]. Raises ValueError where blocks do not fill them."""
    n, k = codes.shape
    if n % ROWS or k % COLUMNS:
        raise ValueError(f"fragments take multiples of {ROWS} rows and {COLUMNS} columns, not {n} × {k}")
    # Row 8q + 2t + h, column 32i + 16s + 8p + 2c + e of a block.
    block, q, t, h, chunk, i, s, p, c, e = range(10)
    split = codes.view(n // ROWS, 8, 4, 2, k // COLUMNS, 2, 2, 2, 4, 2)
    if form == "int8":
        return split.permute(block, chunk, i, t, q, c, s, p, e, h).reshape(n, k)
    # Code h + 2p of half a word e: the last three dimensions, slowest first, are e, p, h.
    ordered = split.permute(block, chunk, t, q, c, i, s, e, p, h)
    if form == "fp4":
        return place_codes(ordered.reshape(-1, 4)).view(torch.uint8).view(n, k // 2)
    ordered = ordered.reshape(-1, 2)
    return (ordered[:, 0] | ordered[:, 1] << 4).view(n, k // 2)


def halves(row: int, count: int, out_features: int) -> Iterator[tuple[int, slice, int, slice]]:
    """Where `count` rows from `row` on, of gate before up, go in a weight whose rows are in "pairs".

    Of each half that has some: 0 for gate or 1 for up, which of the rows they are, the first one's number within the
    half, and the places of what each row has, of `out_features` in all.
    """
    half = out_features // 2
    for which in range(2):
        first, end = max(row, which * half), min(row + count, (which + 1) * half)
        if first < end:
            start = first - which * half
            places = slice(2 * start + which, 2 * (start + end - first) + which, 2)
            yield which, slice(first - row, end - row), start, places


def store_half(data: Tensor, half: int, row: int, codes: Tensor, form: CodeForm) -> None:
    """Lay out uint8 codes [R, K] of gate (half 0) or up (1), from its row `row` on, in `data` [2F, …] of "pairs".

    Raises ValueError where they do not fill half a block.
    """
    (r, k), rows = codes.shape, ROWS // 2
    if r % rows or row % rows or k % COLUMNS:
        raise ValueError(f"half a block takes multiples of {rows} rows and {COLUMNS} columns, not {r} × {k} from {row}")
    block, q, t, chunk, i, s, p, c, e = range(9)
    split = codes.reshape(r // rows, 8, 4, k // COLUMNS, 2, 2, 2, 4, 2)
    place = data[2 * row : 2 * (row + r)]
    if form == "int8":
        place.view(-1, 2)[:, half] = split.permute(block, chunk, i, t, q, c, s, p, e).flatten()
        return
    ordered = split.permute(block, chunk, t, q, c, i, s, e, p).reshape(-1, 2)
    if form == "int4":
        place.bitwise_and_(15 if half else 240).bitwise_or_(ordered.view_as(place) << 4 * half)
        return
    both = ordered.new_zeros((len(ordered), 2, 2))
    both[..., half] = ordered
    words = place.view(torch.int16)
    words.bitwise_and_(field_mask((1 - half, 3 - half))).bitwise_or_(place_codes(both.view(-1, 4)).view_as(words))


def from_fragments(data: Tensor, form: CodeForm) -> Tensor:
    """uint8 [N, K / 2] or [N, K] in fragment order → uint8 codes [N, K]."""
    if form == "int8":
        n, k = data.shape
        block, chunk, i, t, q, c, s, p, e, h = range(10)
        split = data.view(n // ROWS, k // COLUMNS, 2, 4, 8, 4, 2, 2, 2, 2)
        return split.permute(block, q, t, h, chunk, i, s, p, c, e).reshape(n, k)
    n, k = data.shape[0], data.shape[1] * 2
    if form == "fp4":
        codes = placed_codes(data.view(torch.int16).flatten())
    else:
        codes = torch.stack([data.flatten() & 15, data.flatten() >> 4], dim=-1)
    block, chunk, t, q, c, i, s, e, p, h = range(10)
    split = codes.view(n // ROWS, k // COLUMNS, 4, 8, 4, 2, 2, 2, 2, 2)
    return split.permute(block, q, t, h, chunk, i, s, p, c, e).reshape(n, k)
