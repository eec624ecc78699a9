"""Prefill attention in Triton: ragged chunks of query tokens, causal over the paged cache, prefix included.

A tile is `BLOCK_M // group` tokens times the GQA group of one KV head, so that the keys are read once per group and
the causal diagonal wastes at most a block of keys (flash attention, Dao 2023). Each program finds its (row, tile) from
`query_start` on the device: row r owns the tiles from `⌊start_r / tokens⌋ + r` on, and a launch of
`⌊T / tokens⌋ + rows + 1` tiles serves any lengths. The last, extra row is the padding past the real tokens.

Invariants: every token of the launch is written, padding with zeros. Later tiles, which have more keys, start first.
Knows nothing of decode rows but how many to skip: each has one token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

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
from stoker_kernels.launch.triton_tile import find_chunk


@kernel(
    do_not_specialize=[
        *("window", "num_kv_heads", "num_rows", "num_tokens", "first_token", "page_table_stride"),
        *("group", "page_shift", "block_shift", "local_blocks", "block_stride", "head_step", "first_head"),
    ]
)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    page_table_ptr,
    seq_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
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
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (tile of queries, KV head) of `num_rows` rows that follow `first_token` rows, and tokens, of decode.

    EXACT, WHOLE, GROUP, PATTERN and FP8 as in decode: of e4m3, k_ptr and v_ptr are uint16 pairs, and BLOCK_D counts
    pairs.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
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
    tokens_of_tile = BLOCK_M // heads
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    query_start_ptr += first_token
    seq_lens_ptr += first_token
    seq_slots_ptr += first_token
    head = pid % num_kv_heads
    tile = (num_tokens - first_token) // tokens_of_tile + num_rows - pid // num_kv_heads
    row, row_start, query_len, seq_len, first = find_chunk(
        query_start_ptr, seq_lens_ptr, tile, num_rows, num_tokens, first_token, tokens_of_tile
    )
    slot = tl.load(seq_slots_ptr + row, mask=row < num_rows, other=0)
    if first >= query_len:
        return

    m_index = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    token = first + m_index // heads
    q_head = head * heads + m_index % heads
    in_dim = d < HEAD_DIM // PACK
    in_row = (m_index < tokens_of_tile * heads) & (token < query_len)
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
    # Keys below this are visible to every query of the tile, unless the window hides them.
    all_see = tl.minimum(context + first + 1, seq_len)
    key_start = 0
    window_end = 0
    if WINDOW:
        key_start = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
        # Keys from here on are inside the window of every query of the tile.
        window_end = key_end - window
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    if SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=in_row, other=0.0) * LOG2E
    begin = key_start
    stop = key_end
    STEP: tl.constexpr = 1 if PATTERN else BLOCK_N
    if PATTERN:
        query_block = position >> block_shift
        local_from = tl.maximum(((context + first) >> block_shift) - local_blocks + 1, 0) << block_shift
        far, stop = shown_tiles(key_start, key_end, local_from, heads, block_shift, block_stride, head_step, BLOCK_N)
        begin = tl.zeros([], tl.int32)
    for tile_at in tl.range(begin, stop, STEP, num_stages=STAGES):
        key = tile_at
        tile_end = key_end
        place = tile_at
        if PATTERN:
            key, tile_end = shown_tile(
                tile_at, far, key_start, key_end, local_from, heads, head * heads + first_head, block_shift,
                block_stride, head_step, BLOCK_N,
            )
            place = tl.where((key >= key_start) & (key < tile_end), key, key_start)
        offsets = page_offsets(
            page_row, place, key_end, head, stride_page, stride_head, stride_token, shift, WHOLE, BLOCK_N
        )
        loaded = key + n < tile_end
        if PATTERN:
            loaded &= key >= key_start
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=loaded[None, :] & in_dim[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=loaded[:, None] & in_dim[None, :], other=0)
        s = dot_keys(q, q_odd, k, FP8, PRECISION, UNPACK)
        if SOFTCAP:
            s = soft_cap(s * qk_scale, softcap)
        elif SLOPES:
            s = s * qk_scale
        if SLOPES:
            s += slope[:, None] * ((key + n)[None, :] - position[:, None]).to(tl.float32)
        if PATTERN:
            shown = sees_block(
                query_block, key >> block_shift, q_head + first_head, local_blocks, block_stride, head_step
            )
            s = tl.where(shown[:, None] & loaded[None, :], s, -float("inf"))
        if (key + BLOCK_N > all_see) | (key < window_end):
            seen = position[:, None] >= (key + n)[None, :]
            if WINDOW:
                seen &= position[:, None] - (key + n)[None, :] < window
            s = tl.where(seen, s, -float("inf"))
        if SOFTCAP or SLOPES:
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
            base = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s * qk_scale - base[:, None])
        alpha = tl.exp2(m - base)
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        acc, acc_odd = add_values(p, v, alpha, acc, acc_odd, FP8, PRECISION, UNPACK)

    if SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=in_row, other=0.0) * LOG2E
        m_new = tl.maximum(m, sink)
        weight = tl.exp2(m - m_new)
        norm = norm * weight + tl.exp2(sink - m_new)
        acc = acc * weight[:, None]
        acc_odd = acc_odd * weight[:, None]
    factor = (out_scale / tl.where(norm > 0.0, norm, 1.0))[:, None]  # no key: acc is 0
    out_ptrs = out_ptr + at[:, None] * out_stride + q_head[:, None] * HEAD_DIM + d[None, :] * PACK
    tl.store(out_ptrs, (acc * factor).to(out_ptr.dtype.element_ty), mask=in_out)
    if FP8:
        tl.store(out_ptrs + 1, (acc_odd * factor).to(out_ptr.dtype.element_ty), mask=in_out)
