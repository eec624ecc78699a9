"""Attention of images in Triton: flash attention (Dao 2023) over the paged keys, the image's own in both directions.

A tile is `BLOCK_M // group` rows of one image times the GQA group of one KV head, as in prefill, so that the keys are
read once per group. What a row sees has no gaps: it begins with its window, or with the image where that is before,
and ends with the image. A tile reads from the first key that its first row sees.

Invariants: rows of images are written once and all others never. Keys that no row of a tile sees are not read; a row's
sums are over blocks of keys that begin at multiples of BLOCK_N, whatever rows are beside it.
Knows nothing of dispatch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import UNPACK_CVT, add_values, dot_keys, page_offsets, soft_cap


@kernel(do_not_specialize=["window", "num_kv_heads", "tiles", "page_table_stride", "group", "page_shift"])
def image_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    page_table_ptr,
    slots_ptr,
    rows_ptr,
    counts_ptr,
    begins_ptr,
    ends_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,
    softcap,
    window,
    num_kv_heads,
    tiles,
    q_stride,
    out_stride,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (image, tile of its rows, KV head); `tiles` are those of the image with the most rows.

    EXACT: the head dimension fills the tile. WHOLE: a block of keys lies in one page. FP8: k_ptr and v_ptr are uint16
    pairs of e4m3, and BLOCK_D counts pairs.
    """
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
    image = pid // num_kv_heads // tiles
    first = pid // num_kv_heads % tiles * tokens_of_tile
    count = tl.load(counts_ptr + image)
    if first >= count:
        return
    slot = tl.load(slots_ptr + image)
    first_row = tl.load(rows_ptr + image)
    begin = tl.load(begins_ptr + image)
    key_end = tl.load(ends_ptr + image)

    m_index = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    token = first + m_index // group
    q_head = head * group + m_index % group
    in_dim = d < HEAD_DIM // PACK
    in_row = (m_index < tokens_of_tile * group) & (token < count)
    in_out = in_row[:, None] & in_dim[None, :]
    at = (first_row + token).to(tl.int64)
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

    seen_first = 0  # the first key that some row of the tile sees
    all_see = 0  # every row sees the keys from here on
    if WINDOW:
        place = key_end - count + first
        seen_first = tl.maximum(tl.minimum(begin, place - window + 1), 0)
        all_see = tl.minimum(begin, tl.minimum(place + tokens_of_tile, key_end) - window)
        first_seen = tl.minimum(begin, place - first + token - window + 1)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_row = page_table_ptr + slot.to(tl.int64) * page_table_stride
    for key in tl.range(seen_first // BLOCK_N * BLOCK_N, key_end, BLOCK_N, num_stages=STAGES):
        offsets = page_offsets(
            page_row, key, key_end, head, stride_page, stride_head, stride_token, page_shift, WHOLE, BLOCK_N
        )
        loaded = key + n < key_end
        if WINDOW:
            loaded &= key + n >= seen_first
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=loaded[None, :] & in_dim[:, None], other=0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=loaded[:, None] & in_dim[None, :], other=0)
        s = dot_keys(q, q_odd, k, FP8, PRECISION, UNPACK)
        if SOFTCAP:
            s = soft_cap(s * qk_scale, softcap)
        if (key + BLOCK_N > key_end) | (key < all_see):
            seen = key + n < key_end
            s = tl.where(seen[None, :], s, -float("inf"))
            if WINDOW:
                s = tl.where((key + n)[None, :] >= first_seen[:, None], s, -float("inf"))
        if SOFTCAP:
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

    factor = (out_scale / tl.where(norm > 0.0, norm, 1.0))[:, None]
    out_ptrs = out_ptr + at[:, None] * out_stride + q_head[:, None] * HEAD_DIM + d[None, :] * PACK
    tl.store(out_ptrs, (acc * factor).to(out_ptr.dtype.element_ty), mask=in_out)
    if FP8:
        tl.store(out_ptrs + 1, (acc_odd * factor).to(out_ptr.dtype.element_ty), mask=in_out)
