"""The plan of `sm90_latent`: which keys of which row each CTA takes, once a step for all its layers.

Rows are counted in tiles of 64 keys, a row without keys as one. Three ways to deal them to `num_parts` parts: rows as
they are, equally many a part (*whole*); where there are fewer rows than parts, each row in equal pieces of its own, one
a part (*pieces*); all rows in a line that is cut into equal shares, wherever the cuts fall (*line*). A cut costs what a
few tiles do, for partial results have to be written and added up, so that rows stay whole where that takes no part
longer than cuts would.

Invariants: each tile lies in exactly one item, and items follow rows, in the order of their keys: items `[row, slot,
first key, end, the row's first item, how many it has]`, and in 6 and 7 the last two of the row of that number. Parts
follow items: `parts[p, 0]` is part p's first item and `parts[p + 1, 0]` the one behind its last.
Knows nothing of heads, nor of what is done with an item.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

TILE = tl.constexpr(64)
CUT = tl.constexpr(3)  # what rows in pieces cost, in tiles
LINE = tl.constexpr(6)  # what a line costs, whose parts have two rows, and more, each


@kernel(do_not_specialize=["num_rows", "num_parts", "min_tiles"])
def latent_plan_kernel(
    seq_lens_ptr,
    seq_slots_ptr,
    items_ptr,
    parts_ptr,
    num_rows,
    num_parts,
    min_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One program; BLOCK_PARTS > `num_parts`. No piece of a row that has as many is shorter than `min_tiles`."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    seq_lens = tl.load(seq_lens_ptr + rows, mask=live, other=0)
    slots = tl.load(seq_slots_ptr + rows, mask=live, other=0)
    tiles = tl.where(live, tl.maximum(tl.cdiv(seq_lens, TILE), 1), 0)
    total = tl.sum(tiles, 0)
    longest = tl.max(tiles, 0)
    share = tl.maximum(tl.cdiv(total, num_parts), min_tiles)
    each = tl.cdiv(num_rows, num_parts)

    # The smallest piece that gives no more pieces than parts.
    low = share
    high = tl.maximum(longest, share)
    while low < high:
        middle = (low + high) // 2
        enough = tl.sum(tl.cdiv(tiles, middle), 0) <= num_parts
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    in_pieces = high + CUT
    in_line = share + LINE
    if num_rows > num_parts:
        in_pieces = in_line + 1
    whole = each * longest <= tl.minimum(in_pieces, in_line)
    line = (in_line < in_pieces) & (whole == 0)

    first = tl.cumsum(tiles, 0) - tiles
    pieces = tl.cdiv(tiles, high)
    pieces = tl.where(whole, 1, pieces)
    pieces = tl.where(line, (first + tiles - 1) // share - first // share + 1, pieces)
    pieces = tl.where(live, pieces, 0)
    piece = tl.cdiv(tiles, tl.maximum(pieces, 1))
    first_item = tl.cumsum(pieces, 0) - pieces
    num_items = tl.sum(pieces, 0)
    tl.store(items_ptr + rows * 8 + 6, first_item, mask=live)
    tl.store(items_ptr + rows * 8 + 7, pieces, mask=live)
    for i in range(tl.max(pieces, 0)):
        here = i < pieces
        item = first_item + i
        start = i * piece
        end = tl.minimum(start + piece, tiles)
        cut = (first // share + i) * share - first
        start = tl.where(line, tl.maximum(cut, 0), start)
        end = tl.where(line, tl.minimum(cut + share, tiles), end)
        fields = items_ptr + item * 8
        tl.store(fields, rows, mask=here)
        tl.store(fields + 1, slots, mask=here)
        tl.store(fields + 2, start * TILE, mask=here)
        tl.store(fields + 3, tl.minimum(end * TILE, seq_lens), mask=here)
        tl.store(fields + 4, first_item, mask=here)
        tl.store(fields + 5, pieces, mask=here)
        part = tl.where(whole, item // each, item)
        part = tl.where(line, (first + start) // share, part)
        begins = tl.where(line, (first + start) % share == 0, (item % each == 0) | (whole == 0))
        tl.store(parts_ptr + part * 8, item, mask=here & begins)
    used = tl.where(whole, tl.cdiv(num_rows, each), num_items)
    used = tl.where(line, tl.cdiv(total, share), used)
    parts = tl.arange(0, BLOCK_PARTS)
    unused = (parts >= used) & (parts <= num_parts)
    tl.store(parts_ptr + parts * 8, tl.broadcast_to(num_items, parts.shape), mask=unused)
