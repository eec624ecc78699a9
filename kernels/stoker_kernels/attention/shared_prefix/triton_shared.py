"""The kernels of a shared prefix in Triton: the cut of a step's page table, the attention of all rows to the prefix.

A tile is BLOCK_M queries of one KV head, rows after rows with the heads of their group: all see all shared keys, so
there is nothing to mask but the end. Parts of the keys are programs of their own (flash-decoding, Dao et al. 2023);
each leaves normalised values and a log-sum-exp, which the kernel that attends the rest of a row adds to its own.

Invariants: no order of execution changes the result. Without shared keys all results are those of no key.
Knows nothing of how a configuration is chosen.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from stoker_kernels.attention.triton_tiles import UNPACK_CVT, add_values, dot_keys, page_offsets
from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

CUT_PAGES = 512  # of a row, by one program


@kernel(do_not_specialize=["table_stride", "own_stride", "page_shift"])
def cut_prefix_kernel(
    page_table_ptr,
    seq_slots_ptr,
    seq_lens_ptr,
    shared_ptr,
    own_table_ptr,
    own_lens_ptr,
    table_stride,
    own_stride,
    page_shift,
    BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """`own_lens [rows]`, and of `own_table [rows, own_stride]` the pages that hold so many keys; BLOCK of one row."""
    row = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    shared = tl.load(shared_ptr)
    keys = tl.maximum(tl.load(seq_lens_ptr + row) - shared, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    filled = (at << page_shift) < keys
    slot = tl.load(seq_slots_ptr + row).to(tl.int64)
    pages = tl.load(page_table_ptr + slot * table_stride + (shared >> page_shift) + at, mask=filled, other=0)
    tl.store(own_table_ptr + row.to(tl.int64) * own_stride + at, pages, mask=filled)
    tl.store(own_lens_ptr + row, keys)


@kernel(do_not_specialize=["num_rows", "num_kv_heads", "parts", "page_table_stride", "group", "page_shift"])
def shared_prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    values_ptr,
    lse_ptr,
    page_table_ptr,
    seq_slots_ptr,
    own_lens_ptr,
    shared_ptr,
    k_scale_ptr,
    scale_log2,
    num_rows,
    num_kv_heads,
    parts,
    q_stride,
    page_table_stride,
    stride_page,
    stride_head,
    stride_token,
    group,
    head_dim,
    page_shift,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (tile of queries, part, KV head). EXACT, WHOLE and FP8 as in `decode_kernel`; strides are in elements.

    Rows whose `own_lens` are 0 are padding: they have the results of no key.
    """
    PACK: tl.constexpr = 2 if FP8 else 1
    if EXACT:
        HEAD_DIM: tl.constexpr = BLOCK_D * PACK
    else:
        HEAD_DIM = head_dim
    part = tl.program_id(1)
    head = tl.program_id(2)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    row = query // group
    q_head = head * group + query % group
    in_step = row < num_rows
    live = tl.load(own_lens_ptr + row, mask=in_step, other=0) > 0
    in_dim = d < HEAD_DIM // PACK
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * q_stride + q_head[:, None] * HEAD_DIM + d[None, :] * PACK
    q = tl.load(q_ptrs, mask=live[:, None] & in_dim[None, :], other=0.0)
    q_odd = q
    qk_scale = scale_log2
    unit: tl.constexpr = 256.0 if FP8 and UNPACK != UNPACK_CVT else 1.0
    if FP8:
        q_odd = tl.load(q_ptrs + 1, mask=live[:, None] & in_dim[None, :], other=0.0).to(tl.float16)
        q = q.to(tl.float16)
        qk_scale = scale_log2 * tl.load(k_scale_ptr + head) * unit

    keys = tl.load(shared_ptr)
    share = tl.cdiv(tl.cdiv(keys, parts), BLOCK_N) * BLOCK_N
    start = part * share
    end = tl.minimum(start + share, keys)
    # Of a step of padding alone line 0 may be read, whose pages there are; for nothing.
    slot = tl.maximum(tl.load(seq_slots_ptr), 0).to(tl.int64)
    page_row = page_table_ptr + slot * page_table_stride
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        offsets = page_offsets(
            page_row, key, end, head, stride_page, stride_head, stride_token, page_shift, WHOLE, BLOCK_N
        )
        there = key + n < end
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0)
        s = dot_keys(q, q_odd, k, FP8, PRECISION, UNPACK)
        if key + BLOCK_N > end:
            s = tl.where(there[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        acc, acc_odd = add_values(p, v, alpha, acc, acc_odd, FP8, PRECISION, UNPACK)

    some = live & (norm > 0.0)
    norm = tl.where(norm > 0.0, norm, 1.0)
    place = (part * num_rows + row).to(tl.int64) * (num_kv_heads * group) + q_head
    tl.store(lse_ptr + place, tl.where(some, m + tl.log2(norm), -float("inf")), mask=in_step)
    factor = tl.where(some, unit / norm, 0.0)[:, None]
    value_ptrs = values_ptr + place[:, None] * HEAD_DIM + d[None, :] * PACK
    in_out = in_step[:, None] & in_dim[None, :]
    tl.store(value_ptrs, acc * factor, mask=in_out)
    if FP8:
        tl.store(value_ptrs + 1, acc_odd * factor, mask=in_out)
