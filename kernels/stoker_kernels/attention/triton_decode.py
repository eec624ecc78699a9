"""Decode attention in Triton: one query token per row, KV splits planned on the device, pages gathered in place.

Two kernels. The *plan* turns the real `seq_lens` into a list of items (row, key range), so that one launch of fixed
size serves any lengths; it may run once for all layers of a step. *Decode* gives each (item, KV head) to a program,
which packs the GQA group into the rows of one dot; a row in one item writes its output at once, else the program that
arrives last adds the partial results up, in the order of their keys (flash-decoding, Dao et al. 2023, without the
second launch).

Invariants: no order of execution changes the result. Programs past the end of the plan exit at once.
Knows nothing of how a configuration is chosen, nor of prefill.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.attention.triton_tiles import (
    UNPACK_CVT,
    add_values,
    dot_keys,
    page_offsets,
    sees_block,
    shown_tile,
    shown_tiles,
    soft_cap,
)
from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel


@kernel(do_not_specialize=["num_rows", "window", "capacity", "target_items"])
def decode_plan_kernel(
    seq_lens_ptr,
    seq_slots_ptr,
    items_ptr,
    num_items_ptr,
    num_rows,
    window,
    capacity,
    target_items,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Items of `[row, slot, start, end, first_item, num_splits, seq_len, 0]`; one program.

    Keys per item: the share of one of `target_items` equal items, within [MIN_SPLIT, MAX_SPLIT]; more where the
    items would not fit `capacity`, which must exceed `num_rows`.
    """
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    seq_lens = tl.load(seq_lens_ptr + rows, mask=live, other=0)
    slots = tl.load(seq_slots_ptr + rows, mask=live, other=0)
    first_key = tl.where(window > 0, tl.maximum(seq_lens - window, 0) // MIN_SPLIT * MIN_SPLIT, 0)
    keys = seq_lens - first_key
    total = tl.sum(keys, 0)
    wanted = tl.minimum(tl.cdiv(total, target_items), MAX_SPLIT)
    split = tl.maximum(wanted, tl.cdiv(total, capacity - num_rows))
    split = tl.maximum(tl.cdiv(split, MIN_SPLIT), 1) * MIN_SPLIT
    # Equal splits of a row, so that its last one is not a stub.
    num_splits = tl.maximum(tl.cdiv(keys, split), 1)
    row_split = tl.cdiv(tl.cdiv(keys, num_splits), MIN_SPLIT) * MIN_SPLIT
    num_splits = tl.where(live, tl.maximum(tl.cdiv(keys, tl.maximum(row_split, 1)), 1), 0)
    first_item = tl.cumsum(num_splits, 0) - num_splits
    tl.store(num_items_ptr, tl.sum(num_splits, 0))
    for i in range(tl.max(num_splits, 0)):
        here = i < num_splits
        item = items_ptr + (first_item + i) * 8
        start = first_key + i * row_split
        tl.store(item, rows, mask=here)
        tl.store(item + 1, slots, mask=here)
        tl.store(item + 2, start, mask=here)
        tl.store(item + 3, tl.minimum(start + row_split, seq_lens), mask=here)
        tl.store(item + 4, first_item, mask=here)
        tl.store(item + 5, num_splits, mask=here)
        tl.store(item + 6, seq_lens, mask=here)


@triton.jit
def add_results(
    m,
    norm,
    acc,
    acc_odd,
    lse_ptrs,
    value_ptrs,
    count,
    lse_stride,
    HEAD_DIM,
    in_head,
    in_out,
    to_acc,
    FP8: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Merge `count` normalised results, `lse_stride` heads apart, into a running one: (m, norm, acc, acc_odd).

    A value is `to_acc` times as large in `acc`. Of FP8 it lies beside the next, of an odd dimension. EMPTY: both may be
    of no key.
    """
    for _ in tl.range(0, count, 1, loop_unroll_factor=4):
        lse = tl.load(lse_ptrs, mask=in_head, other=0.0, cache_modifier=".cg")
        o = tl.load(value_ptrs, mask=in_out, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, lse)
        base = m_new
        if EMPTY:
            base = tl.where(m_new == -float("inf"), 0.0, m_new)  # of heads that have seen no key yet
        alpha = tl.where(m_new == -float("inf"), 0.0, tl.exp2(m - base))
        weight = tl.where(lse == -float("inf"), 0.0, tl.exp2(lse - base))
        norm = norm * alpha + weight
        acc = acc * alpha[:, None] + o * (weight * to_acc)[:, None]
        if FP8:
            o = tl.load(value_ptrs + 1, mask=in_out, other=0.0, cache_modifier=".cg")
            acc_odd = acc_odd * alpha[:, None] + o * (weight * to_acc)[:, None]
        m = m_new
        lse_ptrs += lse_stride
        value_ptrs += lse_stride * HEAD_DIM
    return m, norm, acc, acc_odd


@kernel(
    do_not_specialize=[
        *("window", "num_kv_heads", "page_table_stride", "group", "page_shift"),
        *("block_shift", "local_blocks", "block_stride", "head_step", "first_head", "parts", "before_stride"),
    ]
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    page_table_ptr,
    items_ptr,
    num_items_ptr,
    partial_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    slopes_ptr,
    before_ptr,
    before_lse_ptr,
    scale_log2,
    softcap,
    window,
    num_kv_heads,
    q_stride,
    out_stride,
    page_table_stride,
    stride_page,
    stride_head,
    stride_token,
    group,
    head_dim,
    page_shift,
    block_shift,
    local_blocks,
    block_stride,
    head_step,
    first_head,
    parts,
    before_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    PATTERN: tl.constexpr,
    BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (item, KV head) of the plan. Strides are in elements of the pointers' types.

    EXACT: the head dimension is the tile's, else `head_dim` of it. WHOLE: as in `page_offsets`. GROUP 0: `group` query
    heads a KV head and pages of `1 << page_shift` keys, else GROUP and `1 << PAGE_SHIFT`.
    FP8: k_ptr and v_ptr are uint16, a pair of head dimensions each, and BLOCK_D counts pairs; the even and the odd
    dimensions are two dots. PATTERN: tiles that no head of the group sees are left out, by `shown_tiles`.
    BEFORE: `parts` results of keys before those of the page table, `before_stride` heads apart, are merged with the
    row's own.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    item = pid // num_kv_heads
    head = pid % num_kv_heads
    if item >= tl.load(num_items_ptr):
        return
    fields = items_ptr + item * 8
    row = tl.load(fields)
    slot = tl.load(fields + 1)
    start = tl.load(fields + 2)
    end = tl.load(fields + 3)
    seq_len = tl.load(fields + 6)
    first_item = tl.load(fields + 4)
    num_splits = tl.load(fields + 5)
    first_key = 0
    if WINDOW:
        first_key = seq_len - window
        start = tl.maximum(start, first_key // BLOCK_N * BLOCK_N)

    PACK: tl.constexpr = 2 if FP8 else 1
    if EXACT:
        HEAD_DIM: tl.constexpr = BLOCK_D * PACK
    else:
        HEAD_DIM = head_dim
    if GROUP > 0:
        heads: tl.constexpr = GROUP
        shift: tl.constexpr = PAGE_SHIFT
    else:
        heads = group
        shift = page_shift
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_dim = d < HEAD_DIM // PACK
    in_out = (g < heads)[:, None] & in_dim[None, :]
    q_heads = head * heads + g
    q_ptrs = q_ptr + row.to(tl.int64) * q_stride + q_heads[:, None] * HEAD_DIM + d[None, :] * PACK
    q = tl.load(q_ptrs, mask=in_out, other=0.0)
    q_odd = q
    qk_scale = scale_log2
    out_scale = 1.0
    if FP8:
        q_odd = tl.load(q_ptrs + 1, mask=in_out, other=0.0).to(tl.float16)
        q = q.to(tl.float16)
        unit: tl.constexpr = 1.0 if UNPACK == UNPACK_CVT else 256.0
        qk_scale = scale_log2 * tl.load(k_scale_ptr + head) * unit
        out_scale = tl.load(v_scale_ptr + head) * unit

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    if SLOPES:
        slope = tl.load(slopes_ptr + q_heads, mask=g < heads, other=0.0) * LOG2E
    begin = start
    stop = end
    STEP: tl.constexpr = 1 if PATTERN else BLOCK_N
    if PATTERN:
        query_block = (seq_len - 1) >> block_shift
        local_from = tl.maximum(query_block - local_blocks + 1, 0) << block_shift
        far, stop = shown_tiles(start, end, local_from, heads, block_shift, block_stride, head_step, BLOCK_N)
        begin = tl.zeros([], tl.int32)
    for at in tl.range(begin, stop, STEP, num_stages=STAGES):
        key = at
        key_end = end
        place = at
        if PATTERN:
            key, key_end = shown_tile(
                at, far, start, end, local_from, heads, head * heads + first_head, block_shift, block_stride, head_step,
                BLOCK_N,
            )
            place = tl.where((key >= start) & (key < key_end), key, start)
        offsets = page_offsets(
            page_row, place, end, head, stride_page, stride_head, stride_token, shift, WHOLE, BLOCK_N
        )
        in_range = key + n < key_end
        if PATTERN:
            in_range &= key >= start
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=in_range[None, :] & in_dim[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=in_range[:, None] & in_dim[None, :], other=0)
        s = dot_keys(q, q_odd, k, FP8, PRECISION, UNPACK) * qk_scale
        if SOFTCAP:
            s = soft_cap(s, softcap)
        if SLOPES:
            s += slope[:, None] * (key + n - (seq_len - 1)).to(tl.float32)[None, :]
        visible = in_range
        if WINDOW:
            visible &= key + n >= first_key
        s = tl.where(visible[None, :], s, -float("inf"))
        if PATTERN:
            seen = sees_block(
                query_block, key >> block_shift, q_heads + first_head, local_blocks, block_stride, head_step
            )
            s = tl.where(seen[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if PATTERN:
            base = tl.where(m_new == -float("inf"), 0.0, m_new)  # of heads that see nothing of these keys
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        acc, acc_odd = add_values(p, v, alpha, acc, acc_odd, FP8, PRECISION, UNPACK)

    dims = d * PACK
    if num_splits > 1:
        # Each split leaves its normalised result and log-sum-exp; an empty one (before the window) weighs nothing.
        some = tl.where(norm > 0.0, norm, 1.0)
        lse = m + tl.log2(some if PATTERN else norm)
        inverse = 1.0 / some
        lse_ptrs = partial_lse_ptr + first_item * num_kv_heads * heads + q_heads
        partial_ptrs = partial_ptr + (
            (first_item.to(tl.int64) * num_kv_heads * heads + q_heads[:, None]) * HEAD_DIM + dims[None, :]
        )
        item_stride = num_kv_heads * heads
        own = item - first_item
        tl.store(lse_ptrs + own * item_stride, lse, mask=g < heads)
        tl.store(partial_ptrs + own * item_stride * HEAD_DIM, acc * inverse[:, None], mask=in_out)
        if FP8:
            tl.store(partial_ptrs + own * item_stride * HEAD_DIM + 1, acc_odd * inverse[:, None], mask=in_out)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrivals = arrivals_ptr + row * num_kv_heads + head
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived != num_splits - 1:
            return
        tl.store(arrivals, 0)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        m, norm, acc, acc_odd = add_results(
            m, norm, acc, acc_odd, lse_ptrs, partial_ptrs, num_splits, item_stride, HEAD_DIM, g < heads, in_out, 1.0,
            FP8, PATTERN,
        )
    if BEFORE:
        first = (row * num_kv_heads + head) * heads + g
        before_ptrs = before_ptr + first.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        to_acc = 1.0
        if FP8:
            to_acc = 1.0 / unit
        m, norm, acc, acc_odd = add_results(
            m, norm, acc, acc_odd, before_lse_ptr + first, before_ptrs, parts, before_stride, HEAD_DIM, g < heads,
            in_out, to_acc, FP8, True,
        )

    if SINKS:
        sink = tl.load(sinks_ptr + q_heads, mask=g < heads, other=0.0) * LOG2E
        m_new = tl.maximum(m, sink)
        weight = tl.exp2(m - m_new)
        norm = norm * weight + tl.exp2(sink - m_new)
        acc = acc * weight[:, None]
        acc_odd = acc_odd * weight[:, None]
    factor = (out_scale / tl.where(norm > 0.0, norm, 1.0))[:, None]  # no key: acc is 0
    out_ptrs = out_ptr + row.to(tl.int64) * out_stride + q_heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, (acc * factor).to(out_ptr.dtype.element_ty), mask=in_out)
    if FP8:
        tl.store(out_ptrs + 1, (acc_odd * factor).to(out_ptr.dtype.element_ty), mask=in_out)
