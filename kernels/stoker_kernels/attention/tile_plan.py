"""The tile plan of `sm90_mixed`: which tile of query tokens belongs to which chunk, once a step for all its layers.

A tile is `tile_tokens` consecutive tokens of one chunk, or of the padding past the last one. Tiles are listed from the
last token to the first, so that of a chunk those with most keys come first.
Invariants: each token of the launch lies in exactly one tile, and a launch serves any lengths within its bounds.
Knows nothing of KV heads, nor of what is done with a tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

PLANNED_TILES = 32  # by one program
ROWS = 128  # looked at together


@kernel(do_not_specialize=["num_rows", "num_tokens", "tile_tokens"])
def tile_plan_kernel(
    query_start_ptr,
    seq_lens_ptr,
    seq_slots_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_rows,
    num_tokens,
    tile_tokens,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Write `[num_tiles, 8]` int32 tiles: token, tokens, position of the first, keys of its row, slot; 3 unused.

    The pointers begin at the first of `num_rows` chunks; `query_start` counts the step's tokens, `num_tokens` in all.
    Padding has 0 keys.
    """
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row = tl.zeros([TILES], tl.int32)  # rows whose tiles all come before
    before = tl.zeros([TILES], tl.int32)  # tiles of those
    total = 0
    for first_row in range(0, num_rows + 1, BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        inside = rows <= num_rows
        starts = tl.load(query_start_ptr + rows, mask=inside, other=0)
        ends = tl.load(query_start_ptr + rows + 1, mask=rows < num_rows, other=num_tokens)
        counts = tl.where(inside, tl.cdiv(ends - starts, tile_tokens), 0)
        ends_of_tiles = total + tl.cumsum(counts, 0)
        passed = inside[None, :] & (ends_of_tiles[None, :] <= tile[:, None])
        row += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends_of_tiles[None, :], 0), 1))
        total += tl.sum(counts, 0)
    tl.store(num_tiles_ptr, total, mask=tl.program_id(0) == 0)
    here = tile < total
    real = here & (row < num_rows)
    start = tl.load(query_start_ptr + row, mask=here, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=real, other=num_tokens)
    seq_len = tl.load(seq_lens_ptr + row, mask=real, other=0)
    slot = tl.load(seq_slots_ptr + row, mask=real, other=0)
    first = (tile - before) * tile_tokens
    fields = tiles_ptr + (total - 1 - tile) * 8
    tl.store(fields, start + first, mask=here)
    tl.store(fields + 1, tl.minimum(tile_tokens, end - start - first), mask=here)
    tl.store(fields + 2, seq_len - (end - start) + first, mask=here)
    tl.store(fields + 3, seq_len, mask=here)
    tl.store(fields + 4, slot, mask=here)
