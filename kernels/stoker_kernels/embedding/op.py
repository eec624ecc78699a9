"""Embedding lookup.

Invariants: ids lie in `[0, V)`; an id outside is the caller's error and is read as zeros by the GPU kernel.
Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

register(
    "embed",
    "triton",
    "stoker_kernels.embedding.triton_embedding:embed",
    triton_supports(torch.bfloat16, torch.float16, torch.float32),
    invariant=True,
)
register("embed", "reference", "stoker_kernels.embedding.reference:embed", reference_supports, invariant=True)


def embed(
    ids: Tensor,
    table: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`ids [T]` int32, `table [V,H]` → `[T,H]` in the table's dtype: scale · table[ids], one rounding.

    With `positions [T]` int32 the rows of `position_table [P,H]` by position are added. On CUDA what was written before
    is settled for the kernels behind it (`pdl.pdl_settle`).
    """
    rows: Tensor = select("embed", table.device, table.dtype)(
        ids, table, scale=scale, positions=positions, position_table=position_table, out=out
    )
    return rows
