"""Tokens that may be taken back, in Triton: states are read and stay, what the tokens would do to them is kept.

A program goes through the tokens of a row, first to last, with the state in registers, by the arithmetic of rows that
decode; so a draft that counts gives what it would have given as the next token.

Invariants: a program has one row, and some channels, or one head and some of its dimensions. A token that there is not
leaves the registers as they are, and gives zeros.
Knows nothing of projections, and of which tokens will count.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import padded_dim
from stoker_kernels.recurrence.triton_delta import values_of
from stoker_kernels.recurrence.triton_gates import softplus
from stoker_kernels.recurrence.triton_mamba2 import block_of
from stoker_kernels.recurrence.types import DraftRows, Tried

CHANNELS = 512  # of a program of the convolution
WARPS = 4


@kernel(do_not_specialize=["rows", "steps", "channels"])
def try_conv_kernel(
    x, state, weight, bias, inputs, mixed, slots, seq_lens, rows, steps, channels, x_stride, state_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, channels)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    place = state + slot * state_stride + channel
    for step in range(steps):
        token = (step * rows + row).to(tl.int64)
        real = (slot >= 0) & (tl.load(seq_lens + token) > 0)
        total = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            before = step + (tap - (WIDTH - 1))
            source = x + (before * rows + row).to(tl.int64) * x_stride + channel
            value = tl.load(source, mask=inside & real & (before >= 0), other=0.0)
            kept = tl.load(place + (before + (WIDTH - 1)) * channels, mask=inside & real & (before < 0), other=0.0)
            gain = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
            total += (value.to(tl.float32) + kept.to(tl.float32)) * gain.to(tl.float32)
            if tap == WIDTH - 1:
                tl.store(inputs + token * channels + channel, value, mask=inside)
        result = tl.where(real, total / (1.0 + tl.exp(-total)), 0.0)
        tl.store(mixed + token * channels + channel, result.to(mixed.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["rows", "steps", "heads", "groups"])
def try_mamba2_kernel(
    xbc, dt, a_log, d, dt_bias, state, gates, y, slots, seq_lens,
    rows, steps, heads, groups, head_dim, size, x_stride, dt_stride, state_stride,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its dimensions)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < head_dim, n < size
    inner = heads * head_dim
    group = inner + head // (heads // groups) * size + n
    rate, shift, skip = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
    slot = tl.load(slots + row).to(tl.int64)
    place = state + slot * state_stride + head * head_dim * size + p[:, None] * size + n[None, :]
    held = tl.load(place, mask=in_p[:, None] & in_n[None, :] & (slot >= 0), other=0.0)
    for step in range(steps):
        token = (step * rows + row).to(tl.int64)
        real = (slot >= 0) & (tl.load(seq_lens + token) > 0)
        source = xbc + token * x_stride
        x = tl.load(source + head * head_dim + p, mask=in_p & real, other=0.0).to(tl.float32)
        b = tl.load(source + group, mask=in_n & real, other=0.0).to(tl.float32)
        c = tl.load(source + group + groups * size, mask=in_n & real, other=0.0).to(tl.float32)
        delta = tl.where(real, softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + shift), 0.0)
        decay = tl.exp(-rate * delta)
        held = decay * held + (delta * x)[:, None] * b[None, :]
        result = tl.sum(held * c[None, :], axis=1) + skip * x
        tl.store(y + token * inner + head * head_dim + p, result.to(y.dtype.element_ty), mask=in_p)
        if tl.program_id(2) == 0:
            tl.store(gates + token * 2 * heads + head, delta)
            tl.store(gates + token * 2 * heads + heads + head, decay)


@kernel(do_not_specialize=["rows", "steps", "heads", "key_heads"])
def try_delta_kernel(
    qkv, b, a, a_log, dt_bias, state, gates, o, slots, seq_lens,
    rows, steps, heads, key_heads, key, value, qkv_stride, gate_stride, state_stride, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its values)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = i < key, j < value
    own = head // (heads // key_heads) * key + i
    rate, shift = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    slot = tl.load(slots + row).to(tl.int64)
    place = state + slot * state_stride + head * key * value + i[:, None] * value + j[None, :]
    held = tl.load(place, mask=in_k[:, None] & in_v[None, :] & (slot >= 0), other=0.0)
    for step in range(steps):
        token = (step * rows + row).to(tl.int64)
        real = (slot >= 0) & (tl.load(seq_lens + token) > 0)
        source = qkv + token * qkv_stride
        q = tl.load(source + own, mask=in_k & real, other=0.0).to(tl.float32)
        k = tl.load(source + key_heads * key + own, mask=in_k & real, other=0.0).to(tl.float32)
        v = tl.load(source + 2 * key_heads * key + head * value + j, mask=in_v & real, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * gate_stride + head).to(tl.float32)))
        faint = softplus(tl.load(a + token * gate_stride + head).to(tl.float32) + shift)
        decay = tl.exp(-rate * tl.where(real, faint, 0.0))
        held *= decay
        missing = (v - tl.sum(held * k[:, None], axis=0)) * beta
        held += k[:, None] * missing[None, :]
        target = o + token * heads * value + head * value + j
        tl.store(target, tl.sum(held * q[:, None], axis=0).to(o.dtype.element_ty), mask=in_v)
        if tl.program_id(2) == 0:
            tl.store(gates + token * 2 * heads + head, beta)
            tl.store(gates + token * 2 * heads + heads + head, decay)


def try_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: DraftRows, tried: Tried) -> Tensor:
    """`op.try_conv` on CUDA."""
    channels, width = weight.shape
    if x.stride(1) != 1 or not state[0].is_contiguous() or not weight.is_contiguous():
        raise ValueError("try_conv takes contiguous channels")
    y = tried.mixed[: len(x)]
    try_conv_kernel[(rows.count, triton.cdiv(channels, CHANNELS))](
        x, state, weight, bias, tried.inputs, y, rows.slots, rows.seq_lens, rows.count, rows.steps, channels,
        x.stride(0), state.stride(0), WIDTH=width, BLOCK=CHANNELS, num_warps=WARPS, **launch_options(x.device),
    )  # fmt: skip
    return y


def try_mamba2(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """`op.try_mamba2` on CUDA."""
    _, heads, head_dim, size = state.shape
    if xbc.stride(1) != 1 or dt.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("try_mamba2 takes contiguous columns and states")
    groups, block = (xbc.shape[1] - heads * head_dim) // (2 * size), block_of(head_dim)
    y = empty((len(xbc), heads * head_dim), dtype=xbc.dtype, device=xbc.device)
    try_mamba2_kernel[(rows.count, heads, triton.cdiv(head_dim, block))](
        xbc, dt, a_log, d, dt_bias, state, tried.gates, y, rows.slots, rows.seq_lens,
        rows.count, rows.steps, heads, groups, head_dim, size, xbc.stride(0), dt.stride(0), state.stride(0),
        BLOCK_P=block, BLOCK_N=padded_dim(size), num_warps=WARPS, **launch_options(xbc.device),
    )  # fmt: skip
    return y


def try_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """`op.try_delta_rule` on CUDA."""
    _, heads, key, value = state.shape
    if qkv.stride(1) != 1 or b.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("try_delta_rule takes contiguous columns and states")
    key_heads, block = (qkv.shape[1] - heads * value) // (2 * key), values_of(value)
    o = empty((len(qkv), heads * value), dtype=qkv.dtype, device=qkv.device)
    try_delta_kernel[(rows.count, heads, triton.cdiv(value, block))](
        qkv, b, a, a_log, dt_bias, state, tried.gates, o, rows.slots, rows.seq_lens,
        rows.count, rows.steps, heads, key_heads, key, value, qkv.stride(0), b.stride(0), state.stride(0), key**-0.5,
        BLOCK_K=padded_dim(key), BLOCK_V=block, num_warps=WARPS, **launch_options(qkv.device),
    )  # fmt: skip
    return o
