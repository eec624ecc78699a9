"""How codes of a weight rest: row by row, as the kernels of tensor cores read them, gate and up in turn or not, or as
a processor's vectors do.

Knows nothing of what a code means.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["rows", "fragments", "pairs", "lanes"]
"""Row by row; in the order of `fragment_gemm.order`; in this order with rows of gate and up in turn; in the order of
`lane_gemm.order`, on a CPU.
"""


def pair_rows(rows: Tensor) -> Tensor:
    """[2F, …], gate before up → the rows of gate and up in turn, as the layout "pairs" stores them."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def unpair_rows(rows: Tensor) -> Tensor:
    """What `pair_rows` was given."""
    return torch.cat((rows[0::2], rows[1::2]))
