"""How experts in integers of four bits rest in memory: codes in words of eight, beside each other by steps; a scale and
a zero point for each group of columns.

Codes lie in words as `steps.py` says, the places 2f and 2f + 1 at bit 4 · f of a word's lower and upper half, so that a
shift and a mask bring two of them to where bf16 and fp16 have their lowest bits. What a group of a row's columns is
scaled by lies beside its zero point, both as numbers of the model's type: [groups, rows, 2]. Of 16 bits they are one
word, which kernels copy like any other; a zero point alone in a byte could not be copied ahead.
Invariants: exact both ways. A value is `(code - zero) · scale`, as everywhere. Groups are whole multiples of 32 columns
that follow each other, or whole rows.
Knows nothing of experts, files and products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.moe.steps import BLOCK, PLACES, runs_of


def columns_of(group: int, columns: int) -> int:
    """Columns of a group of a row with so many; `group` 0: the whole row. Raises ValueError for no whole blocks."""
    found = min(group or columns, columns)
    if found < columns and found % BLOCK:
        raise ValueError(f"groups of {group} columns are no whole blocks of {BLOCK}")
    return found


def groups_of(group: int, columns: int) -> int:
    """Groups of a row of so many columns."""
    return -(-columns // columns_of(group, columns))


def places_together(group: int, columns: int) -> int:
    """How many code places of a step of such a row share a group."""
    found = columns_of(group, columns)
    return PLACES if found == columns else next(count for count in (8, 4, 2, 1) if found % (BLOCK * count) == 0)


def pack_int4(codes: Tensor) -> Tensor:
    """uint8 codes [R, K] as they rest: uint8 [R, K / 2]. Raises ValueError for rows of no whole blocks."""
    rows, columns = codes.shape
    found = torch.empty((rows, columns // 8), dtype=torch.int32, device=codes.device)
    for start, count, words in runs_of(columns):
        part = codes[:, start : start + count * words * PLACES].reshape(rows, count, PLACES, words).int()
        made = torch.zeros((rows, count, words), dtype=torch.int32, device=codes.device)
        for place in range(PLACES):
            made |= part[:, :, place] << _bit(place)
        found[:, start // 8 : start // 8 + count * words] = made.view(rows, -1)
    return found.view(torch.uint8)


def unpack_int4(data: Tensor) -> Tensor:
    """The codes uint8 [R, K] of such rows."""
    rows, columns = data.shape[0], data.shape[1] * 2
    every, found = data.view(torch.int32), torch.empty((rows, columns), dtype=torch.uint8, device=data.device)
    for start, count, words in runs_of(columns):
        part = every[:, start // 8 : start // 8 + count * words].view(rows, count, words)
        codes = torch.stack([part >> _bit(place) & 15 for place in range(PLACES)], dim=2)
        found[:, start : start + count * words * PLACES] = codes.view(rows, -1).to(torch.uint8)
    return found


def int4_values(data: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The numbers of rows, [R, K] in `dtype`, each step rounded: data uint8 [R, K / 2], scale [groups, R, 2]."""
    codes = unpack_int4(data).to(dtype)
    columns = codes.shape[1]
    at = torch.arange(columns, device=data.device) // columns_of(group, columns)
    factor, zero = (each.to(dtype).t()[:, at] for each in scale.unbind(-1))
    return (codes - zero) * factor


def _bit(place: int) -> int:
    """Where the code at a place begins in its word."""
    return 4 * (place // 2) + 16 * (place % 2)
