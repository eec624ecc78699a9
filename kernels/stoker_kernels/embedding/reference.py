"""The embedding in plain PyTorch: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from torch import Tensor


def embed(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of `table` by id."""
    rows = table[ids.long()]
    return rows if out is None else out.copy_(rows)
