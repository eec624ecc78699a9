"""Embedding lookup.

Invariants: ids lie in `[0, V)`; an id outside is the caller's error and is read as zeros by the GPU kernel.
Knows nothing of scaling: a model that scales its embeddings does it itself.
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
)
register("embed", "reference", "stoker_kernels.embedding.reference:embed", reference_supports)


def embed(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`ids [T]` int32, `table [V,H]` → `[T,H]` in the table's dtype."""
    rows: Tensor = select("embed", table.device, table.dtype)(ids, table, out=out)
    return rows
