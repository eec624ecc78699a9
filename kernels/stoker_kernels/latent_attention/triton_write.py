"""In one launch in Triton what stands before latent attention: latents normed, keys and queries rotated, pages written.

Invariants: arithmetic is fp32 with one rounding; each value is read once. A program takes a few tokens and one head of
queries, or their latents. Pairs that rotate together sit in the same thread.
Knows nothing of page tables.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.latent_attention.reference import check_scale
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import e4m3_bits, e4m3_values
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import FP8

TOKENS, WARPS = 4, 4  # a program's


@triton.jit
def _keep(kept, place, value, scale, per_scale, inside, written):
    """Store fp32 `value` as a cache holds it, bytes being e4m3, and what that stands for beside it."""
    if place.dtype.element_ty == tl.uint8:
        bits = e4m3_bits(value * per_scale)
        tl.store(place, bits, mask=inside & written)
        value = e4m3_values(bits, tl.float32) * scale
    own = value.to(kept.dtype.element_ty)
    tl.store(kept, own, mask=inside)
    if place.dtype.element_ty != tl.uint8:
        tl.store(place, own, mask=inside & written)


@kernel(do_not_specialize=["tokens", "heads", "page_shift"])
def latent_rope_write_kernel(
    q,
    latents,
    positions,
    slot_mapping,
    cos_sin,
    cache,
    own,
    norm,
    tokens,
    heads,
    q_stride,
    latents_stride,
    page_stride,
    head_dim,
    rank,
    rotated,
    page_shift,
    eps,
    cache_scale,
    BLOCK_R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Program (block of tokens, head): the last `rotated` of `head_dim` turn; program `heads` has the latents."""
    # Positions and places are settled since the step's embedding: only what was projected has to be waited for.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row = token.to(tl.int64)
    pair = tl.arange(0, HALF)
    half = rotated // 2
    inside = here[:, None] & (pair < half)[None, :]
    position = tl.load(positions + token, mask=here, other=0)
    angle = cos_sin + position.to(tl.int64)[:, None] * rotated + pair[None, :]
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + half, mask=inside, other=0.0)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else half)
    head = tl.program_id(1)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    if head < heads:
        turning = q + row[:, None] * q_stride + head * head_dim + (head_dim - rotated)
        a = tl.load(turning + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(turning + second[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(turning + first[None, :], (a * cos - b * sin).to(q.dtype.element_ty), mask=inside)
        tl.store(turning + second[None, :], (b * cos + a * sin).to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token, mask=here, other=-1)
        width = rank + rotated
        place = cache + ((slot >> page_shift) * page_stride + (slot & ((1 << page_shift) - 1)) * width)[:, None]
        kept = own + row[:, None] * width
        written = (slot >= 0)[:, None]
        r = tl.arange(0, BLOCK_R)
        in_rank = r < rank
        source = latents + row[:, None] * latents_stride
        value = tl.load(source + r[None, :], mask=here[:, None] & in_rank[None, :], other=0.0).to(tl.float32)
        gain = tl.load(norm + r, mask=in_rank, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / rank + eps)
        value = value * inverse[:, None] * gain[None, :]
        scale, per_scale = 1.0, 1.0
        if cache_scale is not None:
            scale = tl.load(cache_scale)
            per_scale = tl.div_rn(1.0, scale)
        _keep(kept + r[None, :], place + r[None, :], value, scale, per_scale, here[:, None] & in_rank[None, :], written)
        a = tl.load(source + rank + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + rank + second[None, :], mask=inside, other=0.0).to(tl.float32)
        at, to = kept + rank, place + rank
        _keep(at + first[None, :], to + first[None, :], a * cos - b * sin, scale, per_scale, inside, written)
        _keep(at + second[None, :], to + second[None, :], b * cos + a * sin, scale, per_scale, inside, written)


def latent_rope_write(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    *,
    norm: Tensor,
    eps: float,
    interleaved: bool,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """`op.latent_rope_write` on CUDA."""
    check_scale(cache, cache_scale)
    tokens, heads, head_dim = q.shape
    rank, rotated, page = norm.shape[0], cos_sin.shape[1], cache.shape[2]
    width = rank + rotated
    checks = (
        (q.stride(2) == 1 and q.stride(1) == head_dim, "q's heads must be contiguous in a token"),
        (latents.stride(1) == 1 and latents.shape[1] == width, f"latents are {tuple(latents.shape)}, not of {width}"),
        (cache.shape[3] == width and cache.stride()[2:] == (width, 1), "the pages of the cache must be contiguous"),
        (
            q.dtype == latents.dtype and cache.dtype in (q.dtype, FP8),
            f"q is {q.dtype}, latents {latents.dtype}, the cache {cache.dtype}",
        ),
        (page & (page - 1) == 0, f"a page holds a power of two of tokens, not {page}"),
    )
    for good, message in checks:
        if not good:
            raise ValueError(f"latent_rope_write: {message}")
    own = torch.empty((tokens, width), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return own
    latent_rope_write_kernel[(triton.cdiv(tokens, TOKENS), heads + 1)](
        q,
        latents,
        positions,
        slot_mapping,
        cos_sin,
        cache if cache_scale is None else cache.view(torch.uint8),
        own,
        norm,
        tokens,
        heads,
        q.stride(0),
        latents.stride(0),
        cache.stride(0),
        head_dim,
        rank,
        rotated,
        page.bit_length() - 1,
        eps,
        cache_scale,
        BLOCK_R=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(rotated // 2),
        INTERLEAVED=interleaved,
        TOKENS=TOKENS,
        num_warps=WARPS,
        **launch_options(q.device),
    )
    return own
