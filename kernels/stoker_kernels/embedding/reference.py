"""The embedding in plain PyTorch: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.launch.deliver import deliver


def embed(
    ids: Tensor,
    table: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of `table` by id, scaled, and those of `position_table` by position."""
    rows = table[ids.long()]
    if scale != 1.0:
        rows = rows.float() * scale
    if positions is not None and position_table is not None:
        rows = rows.float() + position_table[positions.long()].float()
    return deliver(rows, table.dtype, out)
