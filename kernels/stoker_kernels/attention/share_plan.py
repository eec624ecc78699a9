"""The decode plan of `sm90_decode`: all keys of a step in a line, cut into one equal share per CTA.

A stream is one (row, KV head), a unit 64 of its keys, counted from the row's first key on; a row without keys has one
unit too, for its output has to be written. Three ways to cut: where the streams are fewer than the CTAs, each stream
into equal pieces of its own, one per CTA (*pieces*: no CTA works on two streams); where streams are long, the whole
line, wherever the cuts fall (*line*: every CTA moves the same bytes, and at most its first and its last stream are
shared); where all are short, the line too, but a stream belongs to the share that its first unit lies in (*whole*).

A cut costs microseconds, and SMs differ by a tenth in what they read in a second. So where streams are whole, each CTA
gets seven eighths of its share at first; the rest, the *tail*, is in further shares, for CTAs that are done to draw.

Invariants: each unit lies in exactly one share; shares follow the line, so that the shares of a stream are neighbours,
in the order of its keys. Share c starts at unit c · `per_cta` of the line, where pieces count as whole; those of the
tail, from share `num_ctas` on, follow.
Knows nothing of what is done with a share.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

UNIT = tl.constexpr(64)
WHOLE = tl.constexpr(8)  # units of streams that are always kept whole
MIN_TAIL = tl.constexpr(4)  # units


@triton.jit
def _pieces(units, cut, num_kv_heads):
    return tl.sum(tl.cdiv(units, cut), 0) * num_kv_heads


@triton.jit
def _smallest_cut(units, share, num_kv_heads, num_ctas):
    """The smallest piece that gives no more pieces than CTAs; none does where there are more streams than CTAs."""
    low = share
    high = tl.maximum(tl.max(units, 0), share)
    while low < high:
        middle = (low + high) // 2
        enough = _pieces(units, middle, num_kv_heads) <= num_ctas
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _shares_before(unit, per_cta, tail, tail_from_unit, num_ctas):
    """How many shares start before a unit of the line."""
    in_tail = num_ctas + tl.cdiv(tl.maximum(unit - tail_from_unit, 0), tail)
    return tl.where(unit <= tail_from_unit, tl.cdiv(unit, per_cta), in_tail)


@kernel(do_not_specialize=["num_rows", "num_kv_heads", "window", "num_ctas", "num_shares", "min_units", "tail_from"])
def share_plan_kernel(
    seq_lens_ptr,
    seq_slots_ptr,
    shares_ptr,
    num_rows,
    num_kv_heads,
    window,
    num_ctas,
    num_shares,
    min_units,
    tail_from,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CTAS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Write `[num_shares, 8]` int32 shares: row, slot, head, block, units, len, per_cta, tail. One program.

    A share without work has `units` 0, and nothing in its other fields. `per_cta` is 0 where streams are whole; `tail`
    is 1 where there is one: where they are whole, and a CTA's share is `tail_from` units (at least 2) or more.
    `window` > 0: keys that no layer sees, in whole units, are left out. No CTA gets fewer than `min_units` units of a
    stream that has as many.
    """
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    seq_lens = tl.load(seq_lens_ptr + rows, mask=live, other=0)
    slots = tl.load(seq_slots_ptr + rows, mask=live, other=0)
    first_block = tl.where(window > 0, tl.maximum(seq_lens - window, 0) // UNIT, 0)
    units = tl.maximum(tl.cdiv(seq_lens, UNIT) - first_block, 1)
    units = tl.where(live, units, 0)
    units_of_all = tl.sum(units, 0) * num_kv_heads
    share = tl.maximum(tl.cdiv(units_of_all, num_ctas), min_units)

    cut = _smallest_cut(units, share, num_kv_heads, num_ctas)
    # Cuts within streams cost a CTA about two units: what is left over has to be worth more.
    pieces = (_pieces(units, cut, num_kv_heads) <= num_ctas) & (cut <= share + share // 8 + 2)
    whole = (pieces == 0) & (tl.max(units, 0) <= tl.maximum(WHOLE, share // 8))
    tailed = whole & (share >= tail_from) & (num_shares > num_ctas)
    per_cta = tl.where(pieces, cut, tl.where(tailed, share * 7 // 8, share))
    tail_from_unit = tl.where(tailed, num_ctas * per_cta, 0x7FFFFFFF)
    spread = tl.cdiv(units_of_all - num_ctas * per_cta, tl.maximum(num_shares - num_ctas, 1))
    tail = tl.where(tailed, tl.maximum(spread, MIN_TAIL), 1)

    padded = tl.where(pieces, tl.cdiv(units, per_cta) * per_cta, units)
    ends = tl.cumsum(padded * num_kv_heads, 0)
    starts = ends - padded * num_kv_heads
    total = tl.sum(padded, 0) * num_kv_heads
    ctas = tl.arange(0, BLOCK_CTAS)
    idle = (ctas >= _shares_before(total, per_cta, tail, tail_from_unit, num_ctas)) & (ctas < num_shares)
    tl.store(shares_ptr + ctas * 8 + 4, tl.zeros([BLOCK_CTAS], tl.int32), mask=idle)

    # CTAs whose share starts in a row, WIDTH of them at a time.
    WIDTH: tl.constexpr = max(1, 1024 // BLOCK_ROWS)
    first_cta = _shares_before(starts, per_cta, tail, tail_from_unit, num_ctas)
    end_cta = _shares_before(ends, per_cta, tail, tail_from_unit, num_ctas)
    ahead = tl.arange(0, WIDTH)
    for i in range(0, tl.max(end_cta - first_cta, 0), WIDTH):
        cta = first_cta[:, None] + (i + ahead)[None, :]
        here = (cta < end_cta[:, None]) & live[:, None]
        in_tail = tailed & (cta >= num_ctas)
        start = tl.where(in_tail, num_ctas * per_cta + (cta - num_ctas) * tail, cta * per_cta)
        at = start - starts[:, None]
        width = tl.maximum(padded, 1)[:, None]
        head = at // width
        block = at - head * width
        left = tl.where(pieces, tl.broadcast_to(units[:, None] - block, block.shape), total - start)
        fields = shares_ptr + cta * 8
        tl.store(fields, tl.broadcast_to(rows[:, None], cta.shape), mask=here)
        tl.store(fields + 1, tl.broadcast_to(slots[:, None], cta.shape), mask=here)
        tl.store(fields + 2, head, mask=here)
        tl.store(fields + 3, block + first_block[:, None], mask=here)
        tl.store(fields + 4, tl.minimum(left, tl.where(in_tail, tail, per_cta)), mask=here)
        tl.store(fields + 5, tl.broadcast_to(seq_lens[:, None], cta.shape), mask=here)
        tl.store(fields + 6, tl.broadcast_to(tl.where(whole, 0, per_cta), cta.shape), mask=here)
        tl.store(fields + 7, tl.broadcast_to(tailed.to(tl.int32), cta.shape), mask=here)
