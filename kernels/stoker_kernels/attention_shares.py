"""The decode plan of `sm90_decode`: all keys of a step in a line, cut into one equal share per CTA.

A stream is one (row, KV head), a unit 64 of its keys, counted from the row's first key on; a row without keys has one
unit too, for its output has to be written. Two ways to cut: where the streams are fewer than the CTAs, each stream into
equal pieces of its own, one per CTA (*pieces*: no CTA works on two streams); else the whole line, wherever the cuts
fall (*line*: every CTA moves the same bytes, and at most its first and its last stream are shared).

Invariants: each unit lies in exactly one share; shares follow the line, so that the shares of a stream are those of
neighbouring CTAs in the order of its keys. CTA c starts at unit c · `per_cta` of the line, where pieces count as whole.
Knows nothing of what is done with a share.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.pdl import pdl_trigger, pdl_wait
from stoker_kernels.triton_kernel import kernel

UNIT = tl.constexpr(64)


@triton.jit
def _pieces(units, cut, num_kv_heads):
    return tl.sum(tl.cdiv(units, cut), 0) * num_kv_heads


@kernel(do_not_specialize=["num_rows", "num_kv_heads", "window", "num_ctas", "min_units"])
def share_plan_kernel(
    seq_lens_ptr,
    seq_slots_ptr,
    shares_ptr,
    num_rows,
    num_kv_heads,
    window,
    num_ctas,
    min_units,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CTAS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Write `[num_ctas, 8]` int32 shares: row, slot, head, block, units, len, per_cta, 0. One program.

    A CTA without work has `units` 0, and nothing in its other fields. `window` > 0: keys that no layer sees, in whole
    units, are left out. No CTA gets fewer than `min_units` units of a stream that has as many.
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
    share = tl.maximum(tl.cdiv(tl.sum(units, 0) * num_kv_heads, num_ctas), min_units)

    # The smallest piece that gives no more pieces than CTAs; none does where there are more streams than CTAs.
    low = share
    high = tl.maximum(tl.max(units, 0), share)
    for _ in range(24):
        middle = (low + high) // 2
        enough = _pieces(units, middle, num_kv_heads) <= num_ctas
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    # Cuts within streams cost a CTA about two units: what is left over has to be worth more.
    pieces = (_pieces(units, high, num_kv_heads) <= num_ctas) & (high <= share + share // 8 + 2)
    per_cta = tl.where(pieces, high, share)

    padded = tl.where(pieces, tl.cdiv(units, per_cta) * per_cta, units)
    ends = tl.cumsum(padded * num_kv_heads, 0)
    starts = ends - padded * num_kv_heads
    total = tl.sum(padded, 0) * num_kv_heads
    ctas = tl.arange(0, BLOCK_CTAS)
    idle = (ctas >= tl.cdiv(total, per_cta)) & (ctas < num_ctas)
    tl.store(shares_ptr + ctas * 8 + 4, tl.zeros([BLOCK_CTAS], tl.int32), mask=idle)

    # CTAs whose share starts in a row, WIDTH of them at a time.
    WIDTH: tl.constexpr = max(1, 1024 // BLOCK_ROWS)
    first_cta = tl.cdiv(starts, per_cta)
    end_cta = tl.cdiv(ends, per_cta)
    ahead = tl.arange(0, WIDTH)
    for i in range(0, tl.max(end_cta - first_cta, 0), WIDTH):
        cta = first_cta[:, None] + (i + ahead)[None, :]
        here = (cta < end_cta[:, None]) & live[:, None]
        at = cta * per_cta - starts[:, None]
        width = tl.maximum(padded, 1)[:, None]
        head = at // width
        block = at - head * width
        left = tl.where(pieces, tl.broadcast_to(units[:, None] - block, block.shape), total - cta * per_cta)
        fields = shares_ptr + cta * 8
        tl.store(fields, tl.broadcast_to(rows[:, None], cta.shape), mask=here)
        tl.store(fields + 1, tl.broadcast_to(slots[:, None], cta.shape), mask=here)
        tl.store(fields + 2, head, mask=here)
        tl.store(fields + 3, block + first_block[:, None], mask=here)
        tl.store(fields + 4, tl.minimum(left, per_cta), mask=here)
        tl.store(fields + 5, tl.broadcast_to(seq_lens[:, None], cta.shape), mask=here)
        tl.store(fields + 6, tl.broadcast_to(per_cta, cta.shape), mask=here)
