"""The gated delta rule in Triton: decode rows by the recurrence, prompts in chunks by products.

Within a chunk what each token adds, U, hangs on what those before it added: (I + A)·U = β·(V - e^γ·K·S), with
A[i,j] = β_i·e^(γ_i - γ_j)·k_i·k_j below the diagonal and γ the sums of g (Yang et al. 2024, section 3). The inverse of
I + A is solved for all chunks at once, by substitution, which loses nothing where keys are alike; then one program a
row, head and block of values goes through the chunks with the state in registers.

Invariants: a program touches the state of its own columns alone. fp32, products in tf32 where the data has 16 bits.
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
from stoker_kernels.recurrence.triton_gates import softplus, unit_rows
from stoker_kernels.recurrence.types import DELTA_CHUNK, RecurrentRows

VALUES = 32  # columns of a state that a program has at most
DECODE_WARPS, CHUNK_WARPS = 4, 4
# Loads of a chunk are not begun before their turn: so a program fits any GPU, and two of them an SM of Hopper.
CHUNK_STAGES = 1


@kernel(do_not_specialize=["heads", "key_heads"])
def delta_decode_kernel(
    qkv, b, a, a_log, dt_bias, state, o, slots, query_start, seq_lens,
    heads, key_heads, key, value, qkv_stride, gate_stride, state_stride, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its values) of rows with one token each."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = i < key, j < value
    target = o + token * heads * value + head * value + j
    if seq_len > 0:
        source = qkv + token * qkv_stride
        own = head // (heads // key_heads) * key + i
        q = tl.load(source + own, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(source + key_heads * key + own, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(source + 2 * key_heads * key + head * value + j, mask=in_v, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * gate_stride + head).to(tl.float32)))
        step = softplus(tl.load(a + token * gate_stride + head).to(tl.float32) + tl.load(dt_bias + head))
        slot = tl.load(slots + row).to(tl.int64)
        place = state + slot * state_stride + head * key * value + i[:, None] * value + j[None, :]
        inside = in_k[:, None] & in_v[None, :]
        held = tl.load(place, mask=inside & (seq_len > 1), other=0.0) * tl.exp(-tl.exp(tl.load(a_log + head)) * step)
        missing = (v - tl.sum(held * k[:, None], axis=0)) * beta
        held += k[:, None] * missing[None, :]
        tl.store(place, held, mask=inside)
        tl.store(target, tl.sum(held * q[:, None], axis=0).to(o.dtype.element_ty), mask=in_v)
    else:
        tl.store(target, tl.zeros([BLOCK_V], tl.float32).to(o.dtype.element_ty), mask=in_v)


@triton.jit
def _gates(b, a, a_log, dt_bias, token, here, head, gate_stride):
    """β and g of a chunk's tokens; 0 behind its end."""
    gate = token * gate_stride + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + gate, mask=here, other=0.0).to(tl.float32)))
    step = softplus(tl.load(a + gate, mask=here, other=0.0).to(tl.float32) + tl.load(dt_bias + head))
    return tl.where(here, beta, 0.0), tl.where(here, -tl.exp(tl.load(a_log + head)) * step, 0.0)


@kernel(do_not_specialize=["first_row", "heads", "key_heads"])
def delta_solve_kernel(
    qkv, b, a, a_log, dt_bias, inverse, query_start, seq_lens,
    first_row, heads, key_heads, key, qkv_stride, gate_stride,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk, head): (I + A)⁻¹ of a chunk, its rows to `inverse [T, heads, CHUNK]`."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = first_row + tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    head = tl.program_id(2)
    begin = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - begin
    if (first < length) & (tl.load(seq_lens + row) > 0):
        at, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        here = first + at < length
        token = (begin + first + at).to(tl.int64)
        own = key_heads * key + head // (heads // key_heads) * key + i
        inside = here[:, None] & (i < key)[None, :]
        k = unit_rows(tl.load(qkv + token[:, None] * qkv_stride + own[None, :], mask=inside, other=0.0).to(tl.float32))
        beta, g = _gates(b, a, a_log, dt_bias, token, here, head, gate_stride)
        fade = tl.cumsum(g, axis=0)
        below = at[:, None] > at[None, :]
        between = tl.where(below, tl.exp(tl.where(below, fade[:, None] - fade[None, :], 0.0)), 0.0)
        links = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
        solved = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
        for line in range(1, CHUNK):
            chosen = (at == line)[:, None]
            link = tl.sum(tl.where(chosen, links, 0.0), axis=0)
            taken = tl.sum(link[:, None] * solved, axis=0)
            solved -= tl.where(chosen, taken[None, :], 0.0)
        target = inverse + (token * heads + head)[:, None] * CHUNK + at[None, :]
        tl.store(target, solved, mask=here[:, None])


@kernel(do_not_specialize=["first_row", "heads", "key_heads"])
def delta_chunk_kernel(
    qkv, b, a, a_log, dt_bias, state, o, slots, query_start, seq_lens, inverse,
    first_row, heads, key_heads, key, value, qkv_stride, gate_stride, state_stride, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its values): all chunks of the row's tokens."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)
    if seq_len > 0:
        i = tl.arange(0, BLOCK_K)
        j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_k, in_v = i < key, j < value
        slot = tl.load(slots + row).to(tl.int64)
        place = state + slot * state_stride + head * key * value + i[:, None] * value + j[None, :]
        inside = in_k[:, None] & in_v[None, :]
        held = tl.load(place, mask=inside & (seq_len > length), other=0.0)
        own = head // (heads // key_heads) * key + i
        at = tl.arange(0, CHUNK)
        for first in range(0, length, CHUNK):
            here = first + at < length
            token = (begin + first + at).to(tl.int64)
            source = qkv + token[:, None] * qkv_stride
            keys = here[:, None] & in_k[None, :]
            q = unit_rows(tl.load(source + own[None, :], mask=keys, other=0.0).to(tl.float32)) * scale
            k = tl.load(source + (key_heads * key + own)[None, :], mask=keys, other=0.0).to(tl.float32)
            k = unit_rows(k)
            columns = (2 * key_heads * key + head * value + j)[None, :]
            v = tl.load(source + columns, mask=here[:, None] & in_v[None, :], other=0.0).to(tl.float32)
            beta, g = _gates(b, a, a_log, dt_bias, token, here, head, gate_stride)
            fade = tl.cumsum(g, axis=0)
            whole = tl.sum(tl.where(at == CHUNK - 1, fade, 0.0), axis=0)
            grown = tl.exp(fade)[:, None]
            lines = inverse + (token * heads + head)[:, None] * CHUNK + at[None, :]
            solved = tl.load(lines, mask=here[:, None], other=0.0)
            missing = (v - tl.dot(k, held, input_precision=PRECISION) * grown) * beta[:, None]
            added = tl.dot(solved, missing, input_precision=PRECISION)
            seen = at[:, None] >= at[None, :]
            between = tl.where(seen, tl.exp(tl.where(seen, fade[:, None] - fade[None, :], 0.0)), 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
            result = tl.dot(scores, added, input_precision=PRECISION)
            result += tl.dot(q, held, input_precision=PRECISION) * grown
            target = o + token[:, None] * heads * value + (head * value + j)[None, :]
            tl.store(target, result.to(o.dtype.element_ty), mask=here[:, None] & in_v[None, :])
            left = k * tl.exp(whole - fade)[:, None]
            held = held * tl.exp(whole) + tl.dot(tl.trans(left), added, input_precision=PRECISION)
        tl.store(place, held, mask=inside)


def values_of(value: int) -> int:
    """Columns of a state, of `value` in all, that a program has."""
    return min(VALUES, padded_dim(value))


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """`op.gated_delta_rule` on CUDA."""
    _, heads, key, value = state.shape
    if qkv.stride(1) != 1 or b.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("gated_delta_rule takes contiguous columns and states")
    tokens, key_heads = qkv.shape[0], (qkv.shape[1] - heads * value) // (2 * key)
    decodes, chunks = rows.num_decodes, rows.count - rows.num_decodes
    make = torch.empty if decodes == tokens else torch.zeros
    o = make((tokens, heads * value), dtype=qkv.dtype, device=qkv.device)
    data = (qkv, b, a, a_log, dt_bias)
    where = (rows.query_start, rows.seq_lens)
    strides = (qkv.stride(0), b.stride(0))
    sizes = (heads, key_heads, key, value, *strides, state.stride(0), key**-0.5)
    options: dict[str, object] = {"BLOCK_K": padded_dim(key), **launch_options(qkv.device)}
    block = values_of(value)
    if decodes:
        delta_decode_kernel[(decodes, heads, triton.cdiv(value, block))](
            *data, state, o, rows.slots, *where, *sizes, BLOCK_V=block, num_warps=DECODE_WARPS, **options
        )
    if chunks:
        options |= {"CHUNK": DELTA_CHUNK, "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32"}
        inverse = torch.empty((tokens, heads, DELTA_CHUNK), dtype=torch.float32, device=qkv.device)
        delta_solve_kernel[(chunks, triton.cdiv(rows.max_query_len, DELTA_CHUNK), heads)](
            *data, inverse, *where, decodes, heads, key_heads, key, *strides, num_warps=CHUNK_WARPS,
            num_stages=CHUNK_STAGES, **options,
        )
        delta_chunk_kernel[(chunks, heads, triton.cdiv(value, block))](
            *data, state, o, rows.slots, *where, inverse, decodes, *sizes, BLOCK_V=block, num_warps=CHUNK_WARPS,
            num_stages=CHUNK_STAGES, **options,
        )  # fmt: skip
    return o
