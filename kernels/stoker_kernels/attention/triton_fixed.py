"""Attention in Triton whose bits do not depend on the batch: one kernel for decode rows and for chunks.

The keys of a token are taken in *splits* of SPLIT positions, counted from position 0, each with a softmax of its own;
splits are merged from the first to the last. A program runs a tile of query tokens of one row, and KV head, over some
of the row's splits. A chunk's tile runs over all of them; of a decode row each split may be a program's, which leaves
its sums behind for the one that arrives last to merge: the same operations in the same order as within a program.

Invariants: what a token meets is its own keys in their order. Keys of the tile that it does not see, after it or before
its window, add exact zeros: they change no bit. Every tile has the same shape, so every dot is the same instruction;
what may be contracted is written as a fused operation. Every token of the launch is written, padding with zeros.
Knows nothing of which splits are whose (`fixed_plan_kernel` decides), nor of when these kernels run.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.attention.triton_tiles import UNPACK_CVT, add_values, dot_keys, page_offsets, sees_block, soft_cap
from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import find_chunk


@kernel(do_not_specialize=["num_rows", "window", "capacity"])
def fixed_plan_kernel(
    seq_lens_ptr,
    seq_slots_ptr,
    items_ptr,
    num_items_ptr,
    num_rows,
    window,
    capacity,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Items of `[row, slot, first split, end split, first_item, num_items, seq_len, 0]`; one program.

    An item for each split of each row where all of them fit `capacity`, else one for each row: who merges is all that
    differs.
    """
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    seq_lens = tl.load(seq_lens_ptr + rows, mask=live, other=0)
    slots = tl.load(seq_slots_ptr + rows, mask=live, other=0)
    first = tl.where(window > 0, tl.maximum(seq_lens - window, 0) // SPLIT, 0)
    splits = tl.where(live, tl.maximum(tl.cdiv(seq_lens, SPLIT) - first, 1), 0)
    apart = tl.sum(splits, 0) <= capacity
    counts = tl.where(apart, splits, live.to(tl.int32))
    first_item = tl.cumsum(counts, 0) - counts
    tl.store(num_items_ptr, tl.sum(counts, 0))
    for i in range(tl.max(counts, 0)):
        here = i < counts
        item = items_ptr + (first_item + i) * 8
        tl.store(item, rows, mask=here)
        tl.store(item + 1, slots, mask=here)
        tl.store(item + 2, first + i, mask=here)
        tl.store(item + 3, tl.where(apart, first + i + 1, first + splits), mask=here)
        tl.store(item + 4, first_item, mask=here)
        tl.store(item + 5, counts, mask=here)
        tl.store(item + 6, seq_lens, mask=here)


@triton.jit
def _weight(m, most):
    """2^(m − most), 0 where there is no key: of none at all both are −∞."""
    return tl.exp2(m - tl.where(most == -float("inf"), 0.0, most))


@kernel(
    do_not_specialize=[
        *("window", "num_kv_heads", "num_rows", "num_tokens", "first_token", "page_table_stride"),
        *("group", "page_shift", "item_programs", "sums_from"),
        *("block_shift", "local_blocks", "block_stride", "head_step", "first_head"),
    ]
)
def fixed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    page_table_ptr,
    seq_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    items_ptr,
    num_items_ptr,
    partial_ptr,
    partial_max_ptr,
    arrivals_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    slopes_ptr,
    scale_log2,
    softcap,
    window,
    num_kv_heads,
    num_rows,
    num_tokens,
    first_token,
    item_programs,
    sums_from,
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
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    PATTERN: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """The first `item_programs` programs take (item of the decode rows, KV head), the rest (tile of the chunks, head).

    `num_rows` chunks follow `first_token` decode rows, and tokens. What items leave behind: values at `partial`,
    largest scores at `partial_max`, and `sums_from` places after them sums of weights. EXACT, WHOLE and FP8 as of
    `decode_kernel`.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    PACK: tl.constexpr = 2 if FP8 else 1
    if EXACT:
        HEAD_DIM: tl.constexpr = BLOCK_D * PACK
    else:
        HEAD_DIM = head_dim
    tokens_of_tile = BLOCK_M // group
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    head = pid % num_kv_heads
    item = pid // num_kv_heads
    first_item = tl.zeros([], tl.int32)
    num_items = 1
    first_split = 0
    end_split = 0x3FFFFFFF
    if pid < item_programs:
        if item >= tl.load(num_items_ptr):
            return
        fields = items_ptr + item * 8
        row = tl.load(fields)
        slot = tl.load(fields + 1)
        first_split = tl.load(fields + 2)
        end_split = tl.load(fields + 3)
        first_item = tl.load(fields + 4)
        num_items = tl.load(fields + 5)
        seq_len = tl.load(fields + 6)
        row_start = row
        query_len = 1
        first = 0
    else:
        tile = (num_tokens - first_token) // tokens_of_tile + num_rows - (pid - item_programs) // num_kv_heads
        row, row_start, query_len, seq_len, first = find_chunk(
            query_start_ptr + first_token,
            seq_lens_ptr + first_token,
            tile,
            num_rows,
            num_tokens,
            first_token,
            tokens_of_tile,
        )
        slot = tl.load(seq_slots_ptr + first_token + row, mask=row < num_rows, other=0)
        if first >= query_len:
            return

    m_index = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    token = first + m_index // group
    q_head = head * group + m_index % group
    in_dim = d < HEAD_DIM // PACK
    in_row = (m_index < tokens_of_tile * group) & (token < query_len)
    in_out = in_row[:, None] & in_dim[None, :]
    at = (row_start + token).to(tl.int64)
    q_ptrs = q_ptr + at[:, None] * q_stride + q_head[:, None] * HEAD_DIM + d[None, :] * PACK
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

    context = seq_len - query_len
    position = context + token
    key_end = tl.minimum(context + first + tokens_of_tile, seq_len)
    key_start = 0
    if WINDOW:
        key_start = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
    start = tl.maximum(key_start, first_split * SPLIT)
    end = tl.minimum(key_end, tl.minimum(end_split, tl.cdiv(key_end, SPLIT)) * SPLIT)
    all_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    all_norm = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    all_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    if SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=in_row, other=0.0) * LOG2E
    for key in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        offsets = page_offsets(
            page_row, key, end, head, stride_page, stride_head, stride_token, page_shift, WHOLE, BLOCK_N
        )
        loaded = key + n < end
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=loaded[None, :] & in_dim[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=loaded[:, None] & in_dim[None, :], other=0)
        s = dot_keys(q, q_odd, k, FP8, PRECISION, UNPACK)
        s = s * qk_scale
        if SOFTCAP:
            s = soft_cap(s, softcap)
        if SLOPES:
            s += slope[:, None] * ((key + n)[None, :] - position[:, None]).to(tl.float32)
        seen = position[:, None] >= (key + n)[None, :]
        if PATTERN:
            key_block = ((key + n) >> block_shift)[None, :]
            seen &= sees_block(
                (position >> block_shift)[:, None], key_block, (q_head + first_head)[:, None], local_blocks,
                block_stride, head_step,
            )
        if WINDOW:
            seen &= position[:, None] - (key + n)[None, :] < window
        s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        norm = tl.fma(norm, alpha, tl.sum(p, 1))
        m = m_new
        acc, acc_odd = add_values(p, v, alpha, acc, acc_odd, FP8, PRECISION, UNPACK)
        if ((key + BLOCK_N) % SPLIT == 0) | (key + BLOCK_N >= end):
            most = tl.maximum(all_m, m)
            before, now = _weight(all_m, most), _weight(m, most)
            all_norm = tl.fma(all_norm, before, norm * now)
            all_acc = tl.fma(all_acc, tl.broadcast_to(before[:, None], all_acc.shape), acc * now[:, None])
            if FP8:
                all_odd = tl.fma(all_odd, tl.broadcast_to(before[:, None], all_odd.shape), acc_odd * now[:, None])
            all_m = most
            m = tl.full([BLOCK_M], -float("inf"), tl.float32)
            norm = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    dims = d * PACK
    if num_items > 1:
        item_stride = num_kv_heads * group
        scalars = first_item * item_stride + q_head
        values = (first_item.to(tl.int64) * item_stride + q_head[:, None]) * HEAD_DIM + dims[None, :]
        own = (item - first_item) * item_stride
        tl.store(partial_max_ptr + scalars + own, all_m, mask=in_row)
        tl.store(partial_max_ptr + sums_from + scalars + own, all_norm, mask=in_row)
        tl.store(partial_ptr + values + own * HEAD_DIM, all_acc, mask=in_out)
        if FP8:
            tl.store(partial_ptr + values + own * HEAD_DIM + 1, all_odd, mask=in_out)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrivals = arrivals_ptr + row * num_kv_heads + head
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived != num_items - 1:
            return
        tl.store(arrivals, 0)
        all_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        all_norm = tl.zeros([BLOCK_M], tl.float32)
        all_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        all_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in range(num_items):
            of_item = i * item_stride
            place = partial_max_ptr + scalars + of_item
            m = tl.load(place, mask=in_row, other=0.0, cache_modifier=".cg")
            norm = tl.load(place + sums_from, mask=in_row, other=0.0, cache_modifier=".cg")
            part = partial_ptr + values + of_item * HEAD_DIM
            acc = tl.load(part, mask=in_out, other=0.0, cache_modifier=".cg")
            most = tl.maximum(all_m, m)
            before, now = _weight(all_m, most), _weight(m, most)
            all_norm = tl.fma(all_norm, before, norm * now)
            all_acc = tl.fma(all_acc, tl.broadcast_to(before[:, None], all_acc.shape), acc * now[:, None])
            if FP8:
                acc_odd = tl.load(part + 1, mask=in_out, other=0.0, cache_modifier=".cg")
                all_odd = tl.fma(all_odd, tl.broadcast_to(before[:, None], all_odd.shape), acc_odd * now[:, None])
            all_m = most

    if SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=in_row, other=0.0) * LOG2E
        most = tl.maximum(all_m, sink)
        weight = tl.exp2(all_m - most)
        all_norm = tl.fma(all_norm, weight, tl.exp2(sink - most))
        all_acc = all_acc * weight[:, None]
        all_odd = all_odd * weight[:, None]
    factor = (out_scale / tl.where(all_norm > 0.0, all_norm, 1.0))[:, None]  # no key: the sums are 0
    out_ptrs = out_ptr + at[:, None] * out_stride + q_head[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, (all_acc * factor).to(out_ptr.dtype.element_ty), mask=in_out)
    if FP8:
        tl.store(out_ptrs + 1, (all_odd * factor).to(out_ptr.dtype.element_ty), mask=in_out)
