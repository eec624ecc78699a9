"""What steps with a shared prefix keep in memory: each row's own pages, and the results of the parts.

Invariants: allocated once, for the widest step; one step at a time uses it. Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.attention.meta import ResultsBefore
from stoker_kernels.shared_prefix.config import parts_of


@dataclass(frozen=True, slots=True)
class PrefixSpace:
    """`keys [1]` int32 counts the shared keys of a step, whole pages; 0: there are none.

    `table [max_rows, pages]` int32 and `lens [max_rows]` int32 are what rows have behind them, by row; `rows` counts
    up from 0. `values [n · Hq · D]` fp32 and `lse [n · Hq]` fp32 hold the results of parts.
    """

    keys: Tensor
    table: Tensor
    lens: Tensor
    rows: Tensor
    values: Tensor
    lse: Tensor

    def results(self, rows: int, num_q_heads: int, head_dim: int, parts: int) -> ResultsBefore:
        """Room for the results of `rows` rows in so many parts."""
        count = parts * rows * num_q_heads
        shape = (parts, rows, num_q_heads)
        return ResultsBefore(self.values[: count * head_dim].view(*shape, head_dim), self.lse[:count].view(shape))


def most_results(max_rows: int, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_bytes: int) -> int:
    """Results a query head of the steps of up to `max_rows` rows, at most."""
    group = num_q_heads // num_kv_heads
    return max(rows * parts_of(rows, num_kv_heads, group, head_dim, kv_bytes) for rows in range(1, max_rows + 1))


def prefix_space(
    max_rows: int,
    pages: int,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_bytes: int,
    device: torch.device | str,
) -> PrefixSpace:
    """Allocate for steps of up to `max_rows` rows of up to `pages` pages each."""
    results = most_results(max_rows, num_q_heads, num_kv_heads, head_dim, kv_bytes) * num_q_heads
    return PrefixSpace(
        keys=torch.zeros(1, dtype=torch.int32, device=device),
        table=torch.zeros(max_rows, pages, dtype=torch.int32, device=device),
        lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
        rows=torch.arange(max_rows, dtype=torch.int32, device=device),
        values=torch.empty(results * head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(results, dtype=torch.float32, device=device),
    )


def prefix_space_bytes(
    max_rows: int, pages: int, *, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_bytes: int
) -> int:
    """Bytes that `prefix_space` allocates."""
    results = most_results(max_rows, num_q_heads, num_kv_heads, head_dim, kv_bytes) * num_q_heads
    return 4 * (1 + max_rows * (pages + 2) + results * (head_dim + 1))
