"""How experts in integers of eight bits rest in memory: a byte a code, as it stands in its row; a scale and a zero
point for each group of columns.

What a group is scaled by lies beside its zero point as for four bits (`layouts/int4.py`): [groups, rows, 2], numbers
of the model's type, which holds every zero point up to 255 exactly.
Invariants: a value is `(code - zero) · scale`. Groups are whole multiples of 32 columns that follow each other, or
whole rows.
Knows nothing of experts, files and products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.moe.layouts.int4 import columns_of

WIDEST = 128
"""Columns of a step at most."""


def step_columns(group: int, columns: int) -> int:
    """The most columns that a step may have, all of one group: a power of two from 32 on."""
    found = columns_of(group, columns)
    return WIDEST if found == columns else next(step for step in (128, 64, 32) if found % step == 0)


def int8_values(data: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The numbers of rows, [R, K] in `dtype`, each step rounded: data uint8 [R, K], scale [groups, R, 2]."""
    columns = data.shape[1]
    at = torch.arange(columns, device=data.device) // columns_of(group, columns)
    factor, zero = (each.to(dtype).t()[:, at] for each in scale.unbind(-1))
    return (data.to(dtype) - zero) * factor
