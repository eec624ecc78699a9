"""Latent attention in PyTorch, by its definition: each latent is widened to the keys and values of all heads.

Invariants: all arithmetic is fp32, rounded once. Cache slots past a sequence's length are never used, so they may hold
anything, NaN included.
Knows nothing of graphs: it reads lengths on the host, which synchronises a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta
from stoker_kernels.latent_attention.shapes import sizes_of
from stoker_kernels.quant import FP8, FP8_MAX


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
    """`stoker_kernels.latent_attention.op.latent_rope_write`; shapes as there."""
    check_scale(cache, cache_scale)
    rank, table = norm.shape[0], cos_sin[positions.long()]
    latent, key = latents[:, :rank].float(), latents[:, rank:].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * norm.float()
    whole = torch.cat((latent, rotated(key, table, interleaved)), dim=1)
    if cache_scale is None:
        own = kept = whole.to(q.dtype)
    else:
        kept = (whole * cache_scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
        own = (kept.float() * cache_scale).to(q.dtype)
    turning = q[..., q.shape[2] - table.shape[1] :]
    turning.copy_(rotated(turning.float(), table[:, None], interleaved))
    written = slot_mapping >= 0
    pages, offsets = slot_mapping[written] // cache.shape[2], slot_mapping[written] % cache.shape[2]
    cache[pages, 0, offsets] = kept[written].to(cache.dtype)
    return own


def rotated(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """`x [..., P]` fp32 turned by `table`, which broadcasts to it: cos, then sin. Pairs keep their places."""
    cos, sin = table.chunk(2, dim=-1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def latent_attention(
    q: Tensor,
    own: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.latent_attention.op.latent_attention`; shapes as there. `own` is read from the cache."""
    check_scale(cache, cache_scale)
    sizes = sizes_of(q, cache, kv_b)
    out = q.new_zeros(q.shape[0], sizes.heads, sizes.value)
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        if length == 0 or tokens.start == tokens.stop:
            continue
        latents = gathered(cache, meta.page_table[meta.seq_slots[row].long()], length, cache_scale).float()
        latent, key = latents.split((sizes.rank, sizes.rope), dim=1)
        widened = torch.einsum("lr,hdr->hld", latent, kv_b.float())
        keys = torch.cat((widened[..., : sizes.nope], key.expand(sizes.heads, -1, -1)), dim=-1)
        scores = torch.einsum("thd,hld->htl", q[tokens].float(), keys) * scale
        count = tokens.stop - tokens.start
        later = torch.arange(length, device=q.device) > torch.arange(length - count, length, device=q.device)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("htl,hlv->thv", weights, widened[..., sizes.nope :]).to(out.dtype)
    return out


def gathered(cache: Tensor, pages: Tensor, length: int, cache_scale: Tensor | None) -> Tensor:
    """The first `length` tokens of a row of the page table: `[length, R+P]`; of a cache in e4m3 in fp32."""
    page_size = cache.shape[2]
    held = cache[pages[: -(-length // page_size)].long(), 0].reshape(-1, cache.shape[3])[:length]
    return held if cache_scale is None else held.float() * cache_scale


def check_scale(cache: Tensor, cache_scale: Tensor | None) -> None:
    """Raises ValueError for a cache in e4m3 without a scale, or another one with it."""
    if (cache.dtype == FP8) != (cache_scale is not None):
        raise ValueError(f"an e4m3 cache of latents needs cache_scale, and no other takes it; this is {cache.dtype}")
