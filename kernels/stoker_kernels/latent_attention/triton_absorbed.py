"""Attention on latents as they are cached, in Triton: rows of one token, and what lies in pages before a chunk.

Queries have been brought to latents, so all heads share one key, which is their value, too: a tile is of heads (of a
few tokens, where heads are few) against keys that are read once. Decode splits keys as `attention` plans them, and the
program that arrives last adds its row's splits up in the order of their keys. Of chunks each program has a tile of
queries and all of their context, and leaves the log-sum by which what is nearer is joined (`triton_widened.py`).

Invariants: no order of execution changes the result; programs past the end of a plan exit at once. A row without keys
gives zeros, a chunk without context a log-sum of −∞ and no result.
Knows nothing of how queries came to be, nor of chunks' own keys.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import e4m3_values
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import find_chunk


@triton.jit
def attend_latents(
    q_latent,
    q_key,
    cache_ptr,
    page_row,
    start,
    end,
    scale_log2,
    stride_page,
    page_shift,
    rank,
    rotated,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys `[start, end)` of one row of the page table for a tile of queries: greatest logit (in units of log2), sum of
    weights, weighed sum of latents. WHOLE: BLOCK_N keys from a multiple of it lie in one page. Bytes are e4m3, whose
    scale is left to the caller.
    """
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_page = (1 << page_shift) - 1
    width = rank + rotated
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for key in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        there = key + n < end
        if WHOLE:
            page = tl.load(page_row + (key >> page_shift)).to(tl.int64)
            offsets = page * stride_page + ((key & in_page) + n) * width
        else:
            pages = tl.load(page_row + ((key + n) >> page_shift), mask=there, other=0).to(tl.int64)
            offsets = pages * stride_page + ((key + n) & in_page) * width
        at = cache_ptr + offsets[:, None]
        latent = tl.load(at + r[None, :], mask=there[:, None] & (r < rank)[None, :], other=0)
        turned = tl.load(at + rank + p[None, :], mask=there[:, None] & (p < rotated)[None, :], other=0)
        if cache_ptr.dtype.element_ty == tl.uint8:
            latent = e4m3_values(latent, q_latent.dtype)
            turned = e4m3_values(turned, q_latent.dtype)
        s = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        s = tl.dot(q_key, tl.trans(turned), s, input_precision=PRECISION) * scale_log2
        s = tl.where(there[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        weight = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        norm = norm * alpha + tl.sum(weight, 1)
        m = m_new
        acc = tl.dot(weight.to(latent.dtype), latent, acc * alpha[:, None], input_precision=PRECISION)
    return m, norm, acc


@kernel(do_not_specialize=["head_tiles", "heads", "page_table_stride", "page_shift"])
def latent_decode_kernel(
    q_latent_ptr,
    q_ptr,
    cache_ptr,
    out_ptr,
    page_table_ptr,
    items_ptr,
    num_items_ptr,
    partial_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    cache_scale_ptr,
    scale_log2,
    head_tiles,
    heads,
    q_stride,
    head_dim,
    page_table_stride,
    stride_page,
    page_shift,
    rank,
    rotated,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (item of the plan, tile of heads). `q_latent [T,H,R]` and what `out [T,H,R]` gets are contiguous."""
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    item = pid // head_tiles
    tile = pid % head_tiles
    if item >= tl.load(num_items_ptr):
        return
    fields = items_ptr + item * 8
    row = tl.load(fields)
    slot = tl.load(fields + 1)
    start = tl.load(fields + 2)
    end = tl.load(fields + 3)
    first_item = tl.load(fields + 4)
    num_splits = tl.load(fields + 5)

    head = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    is_head = head < heads
    inside = is_head[:, None] & (r < rank)[None, :]
    own = (row.to(tl.int64) * heads + head[:, None]) * rank + r[None, :]
    q_latent = tl.load(q_latent_ptr + own, mask=inside, other=0.0)
    turning = q_ptr + row.to(tl.int64) * q_stride + head[:, None] * head_dim + (head_dim - rotated) + p[None, :]
    q_key = tl.load(turning, mask=is_head[:, None] & (p < rotated)[None, :], other=0.0)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    cache_scale = 1.0
    if cache_scale_ptr is not None:
        cache_scale = tl.load(cache_scale_ptr)
        scale_log2 *= cache_scale
    m, norm, acc = attend_latents(
        q_latent, q_key, cache_ptr, page_row, start, end, scale_log2, stride_page, page_shift, rank, rotated,
        BLOCK_M, BLOCK_R, BLOCK_P, BLOCK_N, STAGES, WHOLE, PRECISION,
    )  # fmt: skip
    if num_splits > 1:
        # Each split leaves its normalised result and log-sum; the barrier puts every thread's stores before the one
        # thread's release.
        lse = m + tl.log2(norm)
        inverse = 1.0 / tl.where(norm > 0.0, norm, 1.0)
        lse_ptrs = partial_lse_ptr + first_item * heads + head
        partial_ptrs = partial_ptr + (first_item.to(tl.int64) * heads + head[:, None]) * rank + r[None, :]
        place = item - first_item
        tl.store(lse_ptrs + place * heads, lse, mask=is_head)
        tl.store(partial_ptrs + place.to(tl.int64) * heads * rank, acc * inverse[:, None], mask=inside)
        tl.debug_barrier()
        arrivals = arrivals_ptr + row * heads + tile
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived != num_splits - 1:
            return
        tl.store(arrivals, 0)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for _ in tl.range(0, num_splits, 1):
            lse = tl.load(lse_ptrs, mask=is_head, other=0.0, cache_modifier=".cg")
            o = tl.load(partial_ptrs, mask=inside, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, lse)
            alpha = tl.exp2(m - m_new)
            weight = tl.exp2(lse - m_new)
            norm = norm * alpha + weight
            acc = acc * alpha[:, None] + o * weight[:, None]
            m = m_new
            lse_ptrs += heads
            partial_ptrs += heads * rank
    o = acc * (cache_scale / tl.where(norm > 0.0, norm, 1.0))[:, None]  # no key: acc is 0
    tl.store(out_ptr + own, o.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(
    do_not_specialize=[
        *("group", "groups", "heads", "num_rows", "num_tokens", "first_token", "page_table_stride", "page_shift")
    ]
)
def latent_context_kernel(
    q_latent_ptr,
    q_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    page_table_ptr,
    seq_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    cache_scale_ptr,
    scale_log2,
    group,
    groups,
    heads,
    num_rows,
    num_tokens,
    first_token,
    q_stride,
    head_dim,
    page_table_stride,
    stride_page,
    page_shift,
    rank,
    rotated,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (tile of queries, `group` of heads) of the rows behind `first_token` rows, and tokens, of decode.

    A tile is BLOCK_M // group tokens. `lse [T,H]` fp32 in units of log2.
    """
    tokens_of_tile = BLOCK_M // group
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    query_start_ptr += first_token
    seq_lens_ptr += first_token
    seq_slots_ptr += first_token
    tile = pid // groups
    row, row_start, query_len, seq_len, first = find_chunk(
        query_start_ptr, seq_lens_ptr, tile, num_rows, num_tokens, first_token, tokens_of_tile
    )
    slot = tl.load(seq_slots_ptr + row, mask=row < num_rows, other=0)
    if first >= query_len:
        return
    m_index = tl.arange(0, BLOCK_M)
    token = first + m_index // group
    head = (pid % groups) * group + m_index % group
    in_row = (m_index < tokens_of_tile * group) & (token < query_len) & (head < heads)
    at = (row_start + token).to(tl.int64)
    context = tl.maximum(seq_len - query_len, 0)
    if context == 0:
        tl.store(lse_ptr + at * heads + head, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=in_row)
        return
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    inside = in_row[:, None] & (r < rank)[None, :]
    own = (at * heads + head)[:, None] * rank + r[None, :]
    q_latent = tl.load(q_latent_ptr + own, mask=inside, other=0.0)
    turning = q_ptr + at[:, None] * q_stride + head[:, None] * head_dim + (head_dim - rotated) + p[None, :]
    q_key = tl.load(turning, mask=in_row[:, None] & (p < rotated)[None, :], other=0.0)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    cache_scale = 1.0
    if cache_scale_ptr is not None:
        cache_scale = tl.load(cache_scale_ptr)
        scale_log2 *= cache_scale
    m, norm, acc = attend_latents(
        q_latent, q_key, cache_ptr, page_row, 0, context, scale_log2, stride_page, page_shift, rank, rotated,
        BLOCK_M, BLOCK_R, BLOCK_P, BLOCK_N, STAGES, WHOLE, PRECISION,
    )  # fmt: skip
    tl.store(lse_ptr + at * heads + head, m + tl.log2(norm), mask=in_row)
    tl.store(out_ptr + own, (acc * (cache_scale / norm)[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
