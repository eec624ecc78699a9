"""Attention of chunks to themselves in Triton, on keys and values widened from their own latents, and joined with what
the chunks saw of their context.

A tile is BLOCK_M queries of one head; it begins with the context's result and log-sum as if they were one key more
(flash attention, Dao 2023, continued).
Invariants: every token of the launch is written, padding with zeros. Later tiles, which have more keys, start first.
Knows nothing of pages.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import find_chunk


@kernel(do_not_specialize=["heads", "num_rows", "num_tokens", "first_token"])
def latent_prefill_kernel(
    q_ptr,
    widened_ptr,
    own_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    scale_log2,
    heads,
    num_rows,
    num_tokens,
    first_token,
    q_stride,
    head_dim,
    rank,
    rotated,
    value_dim,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """One (tile of queries, head). `widened` begins at `first_token`: its tokens have a key and a value for each head.

    `out [T,H,V]` holds what the context gave where `lse [T,H]` is finite.
    """
    pid = tl.program_id(0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    query_start_ptr += first_token
    seq_lens_ptr += first_token
    head = pid % heads
    tile = (num_tokens - first_token) // BLOCK_M + num_rows - pid // heads
    _, row_start, query_len, seq_len, first = find_chunk(
        query_start_ptr, seq_lens_ptr, tile, num_rows, num_tokens, first_token, BLOCK_M
    )
    if first >= query_len:
        return
    still = head_dim - rotated
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, BLOCK_P)
    v = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    token = first + tl.arange(0, BLOCK_M)
    in_row = token < query_len
    at = (row_start + token).to(tl.int64)
    q_at = q_ptr + at[:, None] * q_stride + head * head_dim
    q = tl.load(q_at + d[None, :], mask=in_row[:, None] & (d < still)[None, :], other=0.0)
    q_key = tl.load(q_at + still + p[None, :], mask=in_row[:, None] & (p < rotated)[None, :], other=0.0)
    in_out = in_row[:, None] & (v < value_dim)[None, :]
    out_at = out_ptr + (at * heads + head)[:, None] * value_dim + v[None, :]

    lse = tl.load(lse_ptr + at * heads + head, mask=in_row, other=-float("inf"))
    has_context = lse > -float("inf")
    m = lse
    norm = tl.where(has_context, 1.0, 0.0)
    acc = tl.load(out_at, mask=in_out & has_context[:, None], other=0.0).to(tl.float32)
    widened_stride = heads * (still + value_dim)
    keys_at = widened_ptr + (row_start - first_token).to(tl.int64) * widened_stride + head * (still + value_dim)
    own_at = own_ptr + row_start.to(tl.int64) * (rank + rotated) + rank
    # Of padding there is no key.
    key_end = tl.where(seq_len > 0, tl.minimum(first + BLOCK_M, query_len), 0)
    for key in tl.range(0, key_end, BLOCK_N, num_stages=STAGES):
        there = key + n < key_end
        place = (key + n).to(tl.int64)
        k = tl.load(
            keys_at + place[:, None] * widened_stride + d[None, :],
            mask=there[:, None] & (d < still)[None, :], other=0.0,
        )  # fmt: skip
        turned = tl.load(
            own_at + place[:, None] * (rank + rotated) + p[None, :],
            mask=there[:, None] & (p < rotated)[None, :], other=0.0,
        )  # fmt: skip
        value = tl.load(
            keys_at + place[:, None] * widened_stride + still + v[None, :],
            mask=there[:, None] & (v < value_dim)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.dot(q_key, tl.trans(turned), s, input_precision=PRECISION) * scale_log2
        if key + BLOCK_N > first + 1:
            s = tl.where(token[:, None] >= (key + n)[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        norm = norm * alpha + tl.sum(weight, 1)
        m = m_new
        acc = tl.dot(weight.to(value.dtype), value, acc * alpha[:, None], input_precision=PRECISION)
    o = acc / tl.where(norm > 0.0, norm, 1.0)[:, None]
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=in_out)
