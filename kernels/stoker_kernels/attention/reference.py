"""Paged attention in PyTorch: the oracle of the kernels' tests, and the CPU backend.

Invariants: all arithmetic is fp32, whatever the inputs; the result is rounded once, to q's dtype. Cache slots past a
sequence's length are never used, so they may hold anything, NaN included.
Knows nothing of graphs: it reads lengths on the host, which synchronises a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.attention.inputs import BlockPattern
from stoker_kernels.attention.meta import AttentionMeta

# Keys and values gathered at once for decode rows, in elements: bounds the reference's memory at 2 × 128 MiB.
MAX_GATHERED = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Logits:
    """How scores become weights: everything of the op that is neither a cache nor a length."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None  # [Hkv, G] fp32
    slopes: Tensor | None  # the same
    pattern: BlockPattern | None


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    pattern: BlockPattern | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.attention.op.paged_attention` on any device; shapes as there."""
    if out is None:
        out = torch.empty_like(q)
    num_kv_heads = k_cache.shape[1]
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, -1)
    if slopes is not None:
        slopes = slopes.float().view(num_kv_heads, -1)
    logits = _Logits(scale, window, softcap, sinks, slopes, pattern)
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    seq_lens = meta.seq_lens.tolist()
    starts = meta.query_start.tolist()
    _decode_rows(q, cache, meta, logits, seq_lens[: meta.num_decodes], out)
    for row in range(meta.num_decodes, len(seq_lens)):
        tokens = slice(starts[row], starts[row + 1])
        if seq_lens[row] == 0:
            out[tokens] = 0
        elif tokens.start < tokens.stop:
            pages = meta.page_table[meta.seq_slots[row : row + 1].long()]
            k, v = cache.gather(pages, seq_lens[row])
            out[tokens] = _attend_chunk(q[tokens], k[0], v[0], logits)
    out[starts[-1] :] = 0
    return out


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values by page, with the scales that an e4m3 cache has."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def gather(self, page_rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `[rows, pages]` page tables as two fp32 `[rows, Hkv, length, D]`."""
        page_size = self.k.shape[2]
        pages = page_rows[:, : (length + page_size - 1) // page_size].long()
        return self._one(self.k, self.k_scale, pages, length), self._one(self.v, self.v_scale, pages, length)

    @staticmethod
    def _one(cache: Tensor, head_scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
        rows, count = pages.shape
        _, heads, page_size, dim = cache.shape
        # Stale page-table entries of shorter rows may name no page of this cache.
        taken = cache[pages.clamp(0, cache.shape[0] - 1)].float()
        taken = taken.permute(0, 2, 1, 3, 4).reshape(rows, heads, count * page_size, dim)[:, :, :length]
        if head_scale is not None:
            taken = taken * head_scale.float().view(1, heads, 1, 1)
        return taken


def _decode_rows(
    q: Tensor, cache: Cache, meta: AttentionMeta, logits: _Logits, seq_lens: list[int], out: Tensor
) -> None:
    """One query token per row, rows padded to the longest of their group."""
    _, heads, _, dim = cache.k.shape
    longest = max(seq_lens, default=0)
    if longest == 0:
        out[: len(seq_lens)] = 0
        return
    group_rows = max(1, MAX_GATHERED // (longest * heads * dim))
    for first in range(0, len(seq_lens), group_rows):
        rows = slice(first, min(first + group_rows, len(seq_lens)))
        longest = max(max(seq_lens[rows]), 1)
        k, v = cache.gather(meta.page_table[meta.seq_slots[rows].long()], longest)
        lengths = meta.seq_lens[rows].long().view(-1, 1)
        keys = torch.arange(longest, device=q.device)
        valid = keys < lengths
        if logits.window > 0:
            valid &= lengths - 1 - keys < logits.window
        v = v.masked_fill(~valid[:, None, :, None], 0.0)  # 0 · NaN is NaN
        grouped = q[rows].float().view(k.shape[0], heads, -1, dim)
        scores = _scores(grouped, k, logits)
        if logits.slopes is not None:
            scores = scores + logits.slopes[..., None] * (keys - lengths + 1)[:, None, None]
        seen = valid[:, None, None, :]
        if logits.pattern is not None:
            seen = seen & _seen_blocks(logits.pattern, scores.shape[1:3], lengths - 1, keys).permute(2, 0, 1, 3)
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = _softmax(scores, None if logits.sinks is None else logits.sinks[..., None])
        o = torch.matmul(weights, v).view(k.shape[0], -1, dim)
        out[rows] = o.masked_fill((lengths == 0).view(-1, 1, 1), 0.0).to(out.dtype)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, logits: _Logits) -> Tensor:
    """The last `n` positions `q [n, Hq, D]` of one sequence over all its keys `[Hkv, L, D]`."""
    tokens, _, dim = q.shape
    hidden = 0  # keys that no query sees
    if logits.window > 0:
        # What lies behind the window may be anything, and 0 · NaN is NaN.
        hidden = max(k.shape[1] - tokens - logits.window + 1, 0)
        k, v = k[:, hidden:], v[:, hidden:]
    heads, length, _ = k.shape
    grouped = q.float().view(tokens, heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    position = torch.arange(length - tokens, length, device=q.device)[:, None]
    keys = torch.arange(length, device=q.device)
    valid = keys <= position
    if logits.window > 0:
        valid &= position - keys < logits.window
    scores = _scores(grouped, k[:, None], logits)
    if logits.slopes is not None:
        scores = scores + logits.slopes[..., None, None] * (keys - position)
    if logits.pattern is not None:
        valid = valid & _seen_blocks(logits.pattern, scores.shape[:2], position + hidden, keys + hidden)
    scores = scores.masked_fill(~valid, float("-inf"))
    weights = _softmax(scores, None if logits.sinks is None else logits.sinks[..., None, None])
    o = torch.matmul(weights, v[:, None])
    return o.permute(2, 0, 1, 3).reshape(tokens, -1, dim).to(q.dtype)


def _seen_blocks(pattern: BlockPattern, heads: Sequence[int], positions: Tensor, keys: Tensor) -> Tensor:
    """Whether each head `[Hkv, G]` sees the keys `[L]` from the positions `[n, 1]`: `[Hkv, G, n, L]`."""
    head = torch.arange(math.prod(heads), device=keys.device).view(*heads, 1, 1)
    return pattern.sees(head, positions // pattern.block, keys // pattern.block)


def _scores(q: Tensor, k: Tensor, logits: _Logits) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * logits.scale
    if logits.softcap > 0:
        scores = torch.tanh(scores / logits.softcap) * logits.softcap
    return scores


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the keys; a sink is one more logit whose weight is dropped. A row with no key gives NaN."""
    if sink is None:
        return torch.softmax(scores, dim=-1)
    with_sink = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(with_sink, dim=-1)[..., :-1]
