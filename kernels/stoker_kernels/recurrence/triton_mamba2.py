"""Mamba-2's scan in Triton: decode rows by the recurrence, prompts in chunks by products.

Within a chunk y = (L ∘ C·Bᵀ)·(Δ·x) with the decays L between its tokens, and what came before adds C·S (Dao & Gu
2024, section 6). A program goes through the chunks of a row one after the other and keeps the state in registers, so
that a scan is one launch and takes no memory besides.

Invariants: a program has one row, one head and some of its dimensions, which no other program touches. fp32, products
in tf32 where the data has 16 bits.
Knows nothing of projections.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import padded_dim
from stoker_kernels.recurrence.triton_gates import softplus
from stoker_kernels.recurrence.types import RecurrentRows

CHUNK = 64
DECODE_WARPS, CHUNK_WARPS = 4, 4
# Loads of a chunk are not begun before their turn: so a program fits any GPU, and two of them an SM of Hopper.
CHUNK_STAGES = 1


@kernel(do_not_specialize=["heads", "groups"])
def mamba2_decode_kernel(
    xbc, dt, a_log, d, dt_bias, state, y, slots, query_start, seq_lens,
    heads, groups, head_dim, size, x_stride, dt_stride, state_stride,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its dimensions) of rows with one token each."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < head_dim, n < size
    inner = heads * head_dim
    target = y + token * inner + head * head_dim + p
    if seq_len > 0:
        source = xbc + token * x_stride
        x = tl.load(source + head * head_dim + p, mask=in_p, other=0.0).to(tl.float32)
        group = inner + head // (heads // groups) * size + n
        b = tl.load(source + group, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(source + group + groups * size, mask=in_n, other=0.0).to(tl.float32)
        delta = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
        decay = tl.exp(-tl.exp(tl.load(a_log + head)) * delta)
        slot = tl.load(slots + row).to(tl.int64)
        place = state + slot * state_stride + head * head_dim * size + p[:, None] * size + n[None, :]
        inside = in_p[:, None] & in_n[None, :]
        held = tl.load(place, mask=inside & (seq_len > 1), other=0.0)
        held = decay * held + (delta * x)[:, None] * b[None, :]
        tl.store(place, held, mask=inside)
        result = tl.sum(held * c[None, :], axis=1) + tl.load(d + head) * x
        tl.store(target, result.to(y.dtype.element_ty), mask=in_p)
    else:
        tl.store(target, tl.zeros([BLOCK_P], tl.float32).to(y.dtype.element_ty), mask=in_p)


@kernel(do_not_specialize=["first_row", "heads", "groups"])
def mamba2_chunk_kernel(
    xbc, dt, a_log, d, dt_bias, state, y, slots, query_start, seq_lens,
    first_row, heads, groups, head_dim, size, x_stride, dt_stride, state_stride,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its dimensions): all chunks of the row's tokens."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)
    if seq_len > 0:
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        in_p, in_n = p < head_dim, n < size
        slot = tl.load(slots + row).to(tl.int64)
        place = state + slot * state_stride + head * head_dim * size + p[:, None] * size + n[None, :]
        inside = in_p[:, None] & in_n[None, :]
        held = tl.load(place, mask=inside & (seq_len > length), other=0.0)
        inner = heads * head_dim
        group = inner + head // (heads // groups) * size + n
        rate, shift, skip = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
        at = tl.arange(0, CHUNK)
        for first in range(0, length, CHUNK):
            here = first + at < length
            token = (begin + first + at).to(tl.int64)
            source = xbc + token[:, None] * x_stride
            x = tl.load(source + (head * head_dim + p)[None, :], mask=here[:, None] & in_p[None, :], other=0.0)
            both = here[:, None] & in_n[None, :]
            b = tl.load(source + group[None, :], mask=both, other=0.0).to(tl.float32)
            c = tl.load(source + (group + groups * size)[None, :], mask=both, other=0.0).to(tl.float32)
            x = x.to(tl.float32)
            raw = tl.load(dt + token * dt_stride + head, mask=here, other=0.0).to(tl.float32)
            delta = tl.where(here, softplus(raw + shift), 0.0)
            fade = tl.cumsum(delta * rate, axis=0)
            # Between any two tokens; never by quotients, which overflow.
            seen = at[:, None] >= at[None, :]
            between = tl.where(seen, tl.exp(tl.where(seen, fade[:, None] - fade[None, :], 0.0)), 0.0)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between
            moved = x * delta[:, None]
            result = tl.dot(scores, moved, input_precision=PRECISION)
            result += tl.dot(c, tl.trans(held), input_precision=PRECISION) * tl.exp(fade)[:, None]
            result += skip * x
            target = y + token[:, None] * inner + (head * head_dim + p)[None, :]
            tl.store(target, result.to(y.dtype.element_ty), mask=here[:, None] & in_p[None, :])
            # Of the sums the last, so that the last token's share is whole to the bit.
            whole = tl.sum(tl.where(at == CHUNK - 1, fade, 0.0), axis=0)
            left = moved * tl.exp(whole - fade)[:, None]
            held = held * tl.exp(whole) + tl.dot(tl.trans(left), b, input_precision=PRECISION)
        tl.store(place, held, mask=inside)


def block_of(head_dim: int) -> int:
    """Dimensions of a head that a program has: few are wasted, and long prompts of few heads still fill a GPU."""
    return min(64 if head_dim % 64 == 0 else 32, padded_dim(head_dim))


def mamba2_scan(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """`op.mamba2_scan` on CUDA."""
    _, heads, head_dim, size = state.shape
    if xbc.stride(1) != 1 or dt.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("mamba2_scan takes contiguous columns and states")
    groups = (xbc.shape[1] - heads * head_dim) // (2 * size)
    decodes, chunks = rows.num_decodes, rows.count - rows.num_decodes
    make = torch.empty if decodes == xbc.shape[0] else torch.zeros
    y = make((xbc.shape[0], heads * head_dim), dtype=xbc.dtype, device=xbc.device)
    data = (xbc, dt, a_log, d, dt_bias, state, y, rows.slots, rows.query_start, rows.seq_lens)
    sizes = (heads, groups, head_dim, size, xbc.stride(0), dt.stride(0), state.stride(0))
    block, options = block_of(head_dim), launch_options(xbc.device)
    blocks = {"BLOCK_P": block, "BLOCK_N": padded_dim(size)}
    if decodes:
        mamba2_decode_kernel[(decodes, heads, triton.cdiv(head_dim, block))](
            *data, *sizes, **blocks, num_warps=DECODE_WARPS, **options
        )
    if chunks:
        precision = "ieee" if xbc.dtype == torch.float32 else "tf32"
        mamba2_chunk_kernel[(chunks, heads, triton.cdiv(head_dim, block))](
            *data, decodes, *sizes, **blocks, CHUNK=CHUNK, PRECISION=precision, num_warps=CHUNK_WARPS,
            num_stages=CHUNK_STAGES, **options,
        )
    return y
