"""The causal convolution in Triton: a program has some channels of some tokens of one row.

Invariants: every token's inputs are read as they were before the step; the row's first program, which alone reads its
state, writes it too, after it has read. The rows that decode are a launch of their own, of one token each.
Knows nothing of what follows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.recurrence.types import RecurrentRows

# Channels of a program, where rows have one token and where they have several; tokens of the latter.
DECODE_BLOCK, CHUNK_BLOCK, CHUNK_TOKENS = 512, 128, 32
WARPS = 4


@kernel(do_not_specialize=["first_row", "channels"])
def causal_conv_kernel(
    x, state, weight, bias, y, slots, query_start, seq_lens, first_row, channels, x_stride, state_stride,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, tokens, channels). KEPT: the least power of two of WIDTH - 1 or more."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = first_row + tl.program_id(0)
    begin = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)
    first = tl.program_id(1) * TOKENS
    if first < length:
        real = seq_len > 0
        held = real & (seq_len > length)
        slot = tl.load(slots + row).to(tl.int64)
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = (channel < channels)[None, :]
        place = state + slot * state_stride + channel[None, :]
        source = x + channel[None, :]
        offset = first + tl.arange(0, TOKENS)
        here = offset < length
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        if bias is not None:
            total += tl.load(bias + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            before = offset + (tap - (WIDTH - 1))
            new = (here & (before >= 0))[:, None] & inside & real
            old = (here & (before < 0))[:, None] & inside & held
            value = tl.load(source + (begin + before).to(tl.int64)[:, None] * x_stride, mask=new, other=0.0)
            kept = tl.load(place + (before + (WIDTH - 1))[:, None] * channels, mask=old, other=0.0)
            gain = tl.load(weight + channel[None, :] * WIDTH + tap, mask=inside, other=0.0)
            total += (value.to(tl.float32) + kept.to(tl.float32)) * gain.to(tl.float32)
        result = tl.where(real, total / (1.0 + tl.exp(-total)), 0.0)
        target = y + (begin + offset).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(target, result.to(y.dtype.element_ty), mask=here[:, None] & inside)
        if first == 0:
            place_at = tl.arange(0, KEPT)
            at = length - (WIDTH - 1) + place_at
            wanted = (place_at < WIDTH - 1)[:, None] & inside & real
            recent = wanted & (at >= 0)[:, None]
            last = tl.load(source + (begin + at).to(tl.int64)[:, None] * x_stride, mask=recent, other=0.0)
            older = wanted & (at < 0)[:, None] & held
            last += tl.load(place + (at + (WIDTH - 1))[:, None] * channels, mask=older, other=0.0)
            # All of the program's threads have read what others of them write.
            tl.debug_barrier()
            tl.store(place + place_at[:, None] * channels, last, mask=wanted)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows) -> Tensor:
    """`op.causal_conv` on CUDA."""
    channels, width = weight.shape
    if x.stride(1) != 1 or not state[0].is_contiguous() or not weight.is_contiguous() or width > CHUNK_TOKENS:
        raise ValueError(f"causal_conv takes contiguous channels, and at most {CHUNK_TOKENS} taps; got {width}")
    decodes = rows.num_decodes
    # Tokens behind the last row are nobody's.
    make = torch.empty if decodes == x.shape[0] else torch.zeros
    y = make(x.shape, dtype=x.dtype, device=x.device)
    for first, count, tokens in ((0, decodes, 1), (decodes, rows.count - decodes, CHUNK_TOKENS)):
        if count == 0:
            continue
        block = DECODE_BLOCK if tokens == 1 else CHUNK_BLOCK
        longest = 1 if tokens == 1 else rows.max_query_len
        causal_conv_kernel[(count, triton.cdiv(longest, tokens), triton.cdiv(channels, block))](
            x, state, weight, bias, y, rows.slots, rows.query_start, rows.seq_lens, first, channels, x.stride(0),
            state.stride(0), WIDTH=width, KEPT=triton.next_power_of_2(max(1, width - 1)), TOKENS=tokens, BLOCK=block,
            num_warps=WARPS, **launch_options(x.device),
        )  # fmt: skip
    return y
