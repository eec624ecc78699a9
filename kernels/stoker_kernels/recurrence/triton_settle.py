"""Which of the tokens that were tried count, in Triton: the states of all layers move on by them, in one launch.

Invariants: the arithmetic is that of `triton_try.py`, from what it kept; a row of which nothing counts is not touched.
Knows nothing of projections, and of why a token counts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import padded_dim
from stoker_kernels.recurrence.triton_delta import values_of
from stoker_kernels.recurrence.triton_mamba2 import block_of
from stoker_kernels.recurrence.triton_try import CHANNELS, WARPS
from stoker_kernels.recurrence.types import Tried


@kernel(do_not_specialize=["rows", "channels", "taken_stride"])
def settle_conv_kernel(
    state, inputs, slots, taken, rows, channels, taken_stride, layer_stride, state_stride, input_stride,
    KEPT: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, layer, channels). KEPT: W - 1; LINES: the least power of two of KEPT or more."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(taken + row * taken_stride)
    slot = tl.load(slots + row).to(tl.int64)
    if (count > 0) & (slot >= 0):
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        line = tl.arange(0, LINES)
        wanted = (line < KEPT)[:, None] & (channel < channels)[None, :]
        place = state + layer * layer_stride + slot * state_stride + channel[None, :]
        at = count - KEPT + line
        source = inputs + layer * input_stride + (at * rows + row).to(tl.int64)[:, None] * channels + channel[None, :]
        last = tl.load(source, mask=wanted & (at >= 0)[:, None], other=0.0)
        last += tl.load(place + (at + KEPT)[:, None] * channels, mask=wanted & (at < 0)[:, None], other=0.0)
        # All of the program's threads have read what others of them write.
        tl.debug_barrier()
        tl.store(place + line[:, None] * channels, last, mask=wanted)


@kernel(do_not_specialize=["rows", "heads", "groups", "taken_stride"])
def settle_mamba2_kernel(
    state, mixed, gates, slots, taken, rows, heads, groups, head_dim, size, taken_stride,
    channels, layer_stride, state_stride, mixed_stride, gate_stride,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head of a layer, block of its dimensions)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    count = tl.load(taken + row * taken_stride)
    slot = tl.load(slots + row).to(tl.int64)
    if (count > 0) & (slot >= 0):
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        in_p, in_n = p < head_dim, n < size
        group = heads * head_dim + head // (heads // groups) * size + n
        place = state + layer * layer_stride + slot * state_stride
        place += head * head_dim * size + p[:, None] * size + n[None, :]
        inside = in_p[:, None] & in_n[None, :]
        held = tl.load(place, mask=inside, other=0.0)
        for step in range(count):
            token = (step * rows + row).to(tl.int64)
            source = mixed + layer * mixed_stride + token * channels
            x = tl.load(source + head * head_dim + p, mask=in_p, other=0.0).to(tl.float32)
            b = tl.load(source + group, mask=in_n, other=0.0).to(tl.float32)
            gate = gates + layer * gate_stride + token * 2 * heads + head
            held = tl.load(gate + heads) * held + (tl.load(gate) * x)[:, None] * b[None, :]
        tl.store(place, held, mask=inside)


@kernel(do_not_specialize=["rows", "heads", "key_heads", "taken_stride"])
def settle_delta_kernel(
    state, mixed, gates, slots, taken, rows, heads, key_heads, key, value, taken_stride,
    channels, layer_stride, state_stride, mixed_stride, gate_stride,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head of a layer, block of its values)."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    count = tl.load(taken + row * taken_stride)
    slot = tl.load(slots + row).to(tl.int64)
    if (count > 0) & (slot >= 0):
        i = tl.arange(0, BLOCK_K)
        j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_k, in_v = i < key, j < value
        own = key_heads * key + head // (heads // key_heads) * key + i
        place = state + layer * layer_stride + slot * state_stride
        place += head * key * value + i[:, None] * value + j[None, :]
        inside = in_k[:, None] & in_v[None, :]
        held = tl.load(place, mask=inside, other=0.0)
        for step in range(count):
            token = (step * rows + row).to(tl.int64)
            source = mixed + layer * mixed_stride + token * channels
            k = tl.load(source + own, mask=in_k, other=0.0).to(tl.float32)
            v = tl.load(source + 2 * key_heads * key + head * value + j, mask=in_v, other=0.0).to(tl.float32)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            gate = gates + layer * gate_stride + token * 2 * heads + head
            held *= tl.load(gate + heads)
            missing = (v - tl.sum(held * k[:, None], axis=0)) * tl.load(gate)
            held += k[:, None] * missing[None, :]
        tl.store(place, held, mask=inside)


def settle_conv(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """`op.settle_conv` on CUDA."""
    layers, _, kept, channels = state.shape
    _require_contiguous(state, tried)
    settle_conv_kernel[(len(slots), layers, triton.cdiv(channels, CHANNELS))](
        state, tried.inputs, slots, taken, len(slots), channels, taken.stride(0), state.stride(0), state.stride(1),
        tried.inputs.stride(0), KEPT=kept, LINES=triton.next_power_of_2(kept), BLOCK=CHANNELS, num_warps=WARPS,
        **launch_options(state.device),
    )  # fmt: skip


def settle_mamba2(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """`op.settle_mamba2` on CUDA."""
    layers, _, heads, head_dim, size = state.shape
    _require_contiguous(state, tried)
    block, channels = block_of(head_dim), tried.mixed.shape[2]
    settle_mamba2_kernel[(len(slots), layers * heads, triton.cdiv(head_dim, block))](
        state, tried.mixed, tried.gates, slots, taken, len(slots), heads, (channels - heads * head_dim) // (2 * size),
        head_dim, size, taken.stride(0), channels, state.stride(0), state.stride(1), tried.mixed.stride(0),
        tried.gates.stride(0), BLOCK_P=block, BLOCK_N=padded_dim(size), num_warps=WARPS,
        **launch_options(state.device),
    )  # fmt: skip


def settle_delta_rule(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """`op.settle_delta_rule` on CUDA."""
    layers, _, heads, key, value = state.shape
    _require_contiguous(state, tried)
    block, channels = values_of(value), tried.mixed.shape[2]
    settle_delta_kernel[(len(slots), layers * heads, triton.cdiv(value, block))](
        state, tried.mixed, tried.gates, slots, taken, len(slots), heads, (channels - heads * value) // (2 * key),
        key, value, taken.stride(0), channels, state.stride(0), state.stride(1), tried.mixed.stride(0),
        tried.gates.stride(0), BLOCK_K=padded_dim(key), BLOCK_V=block, num_warps=WARPS,
        **launch_options(state.device),
    )  # fmt: skip


def _require_contiguous(state: Tensor, tried: Tried) -> None:
    if not all(each[0, 0].is_contiguous() for each in (state, tried.inputs, tried.mixed, tried.gates)):
        raise ValueError("states, and what was tried, are contiguous a slot and a token")
