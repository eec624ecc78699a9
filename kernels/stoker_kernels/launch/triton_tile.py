"""What kernels over ragged tokens share about their tiles: how a tile holds a head, and whose tokens it has.

Invariants: a launch of `⌊tokens / tokens_of_tile⌋ + rows + 1` tiles serves any lengths of the rows.
Knows nothing of what is done with a tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


def padded_dim(head_dim: int) -> int:
    """The head dimension as a tile holds it: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@triton.jit
def find_row(query_start_ptr, tile, num_rows, first_token, tokens_of_tile, BLOCK_ROWS: tl.constexpr):
    """The row that owns `tile`; `num_rows` for the padding's."""
    below = 0
    for first in range(0, num_rows + 1, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        starts = tl.load(query_start_ptr + rows, mask=rows <= num_rows, other=0) - first_token
        owned = (rows <= num_rows) & (starts // tokens_of_tile + rows <= tile)
        below += tl.sum(owned.to(tl.int32), 0)
    return below - 1
