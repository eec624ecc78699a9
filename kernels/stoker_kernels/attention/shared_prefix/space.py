"""What steps with a shared prefix keep in memory: each row's own pages, and the results of the parts.

Invariants: allocated once, for the widest step; one step at a time uses it. Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.attention.meta import ResultsBefore
from stoker_kernels.attention.shared_prefix.config import parts_of


@dataclass(frozen=True, slots=True)
class PrefixSizes:
    """Steps of up to `max_rows` rows of up to `pages` pages of `page_size` tokens, and the heads of a layer."""

    max_rows: int
    pages: int
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int

    def parts(self, rows: int) -> int:
        """How many programs share the keys of one tile of queries."""
        group = self.num_q_heads // self.num_kv_heads
        return parts_of(rows, self.num_kv_heads, group, self.head_dim, self.kv_bytes)

    @property
    def most_results(self) -> int:
        """Results of queries, one a head, that a step leaves at most."""
        return self.num_q_heads * max(rows * self.parts(rows) for rows in range(1, self.max_rows + 1))

    @property
    def nbytes(self) -> int:
        """What `prefix_space` allocates."""
        return 4 * (1 + self.max_rows * (self.pages + 2) + self.most_results * (self.head_dim + 1))


@dataclass(frozen=True, slots=True)
class PrefixSpace:
    """`keys [1]` int32 counts the shared keys of a step, whole pages; 0: there are none.

    `table [max_rows, pages]` int32 and `lens [max_rows]` int32 are what rows have behind them, by row; `rows` counts
    up from 0. `values [n · Hq · D]` fp32 and `lse [n · Hq]` fp32 hold the results of parts.
    """

    sizes: PrefixSizes
    keys: Tensor
    table: Tensor
    lens: Tensor
    rows: Tensor
    values: Tensor
    lse: Tensor

    def results(self, rows: int) -> ResultsBefore:
        """Room for the results of `rows` rows, in the parts that such a step has."""
        shape = (self.sizes.parts(rows), rows, self.sizes.num_q_heads)
        count, dim = shape[0] * shape[1] * shape[2], self.sizes.head_dim
        return ResultsBefore(self.values[: count * dim].view(*shape, dim), self.lse[:count].view(shape))


def prefix_space(sizes: PrefixSizes, device: torch.device | str) -> PrefixSpace:
    """Allocate for steps of these sizes."""
    results = sizes.most_results
    return PrefixSpace(
        sizes,
        keys=torch.zeros(1, dtype=torch.int32, device=device),
        table=torch.zeros(sizes.max_rows, sizes.pages, dtype=torch.int32, device=device),
        lens=torch.zeros(sizes.max_rows, dtype=torch.int32, device=device),
        rows=torch.arange(sizes.max_rows, dtype=torch.int32, device=device),
        values=torch.empty(results * sizes.head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(results, dtype=torch.float32, device=device),
    )
