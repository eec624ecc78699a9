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


@triton.jit
def find_chunk(query_start_ptr, seq_lens_ptr, tile, num_rows, num_tokens, first_token, tokens_of_tile):
    """(row, its first token, its number of tokens in this launch, its keys, the tile's first token in the row).

    Padding is the row `num_rows`, which has no keys. A tile that begins past its row's tokens has nothing to do.
    """
    row = find_row(query_start_ptr, tile, num_rows, first_token, tokens_of_tile, 128)
    row_start = tl.load(query_start_ptr + row)
    real = row < num_rows
    row_end = tl.load(query_start_ptr + row + 1, mask=real, other=num_tokens)
    seq_len = tl.load(seq_lens_ptr + row, mask=real, other=0)
    first = (tile - ((row_start - first_token) // tokens_of_tile + row)) * tokens_of_tile
    return row, row_start, row_end - row_start, seq_len, first
