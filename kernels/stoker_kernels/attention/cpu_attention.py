"""Paged attention on a CPU: pages gathered as blocks, then torch's fused attention in the cache's own type.

Invariants: scores and sums are fp32, and what is read of a page past a sequence's length has no weight. What is rare on
a CPU (soft-caps, sinks, slopes, patterns, caches of another type than the queries) is left to the reference.
`attend_rows`, by csrc/cpu_rows.c, takes each token by itself, decode rows and chunks alike; what C gets is contiguous.
Knows nothing of graphs.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.attention.inputs import BlockPattern
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.reference import Cache, reference_attention
from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import refuse_tape
from stoker_kernels.launch.dispatch import Target, cpu_supports

# Rows are padded to the longest of them as long as that wastes no more than half of the work.
MOST_PADDING = 2
ROWS_LIBRARY = "cpu_rows"
ROWS_LANES, ROWS_MOST_DIM = 16, 1024
# Products of queries and keys below which a second thread costs more than it brings.
ROWS_THREAD_PRODUCTS = 1 << 20
_takes = cpu_supports(torch.bfloat16, torch.float16, torch.float32)


def paged_attention(
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
    """`stoker_kernels.attention.op.paged_attention`; shapes as there."""
    rare = any(each is not None for each in (sinks, slopes, pattern, k_scale, v_scale))
    if softcap or rare or k_cache.dtype != q.dtype:
        return reference_attention(
            q, k_cache, v_cache, meta, scale=scale, window=window, softcap=softcap,
            k_scale=k_scale, v_scale=v_scale, sinks=sinks, slopes=slopes, pattern=pattern, out=out,
        )  # fmt: skip
    if out is None:
        out = torch.empty_like(q)
    lengths = meta.seq_lens.tolist()
    for rows in _groups(lengths[: meta.num_decodes]):
        _decode(q, k_cache, v_cache, meta, lengths, rows, scale, window, out)
    chunks(q, k_cache, v_cache, meta, lengths, scale, window, out)
    return out


def chunks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    lengths: list[int],
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """The rows behind those that decode, each by itself, and zeros for tokens of padding."""
    starts = meta.query_start.tolist()
    for row in range(meta.num_decodes, len(lengths)):
        tokens = slice(starts[row], starts[row + 1])
        if lengths[row] == 0:
            out[tokens] = 0
        elif tokens.start < tokens.stop:
            # Pages behind the window may be others' by now.
            size, count = k_cache.shape[2], tokens.stop - tokens.start
            behind = max(lengths[row] - count - window + 1, 0) // size if window else 0
            table = meta.page_table[meta.seq_slots[row : row + 1], behind:]
            k, v = (_gather(cache, table, lengths[row] - behind * size) for cache in (k_cache, v_cache))
            out[tokens] = _chunk(q[tokens], k, v, scale, window)
    if starts[-1] < len(out):
        out[starts[-1] :] = 0


def _groups(lengths: list[int]) -> list[slice]:
    """Neighbouring decode rows that run together."""
    groups: list[slice] = []
    first, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if (row + 1 - first) * longest > MOST_PADDING * total:
            groups.append(slice(first, row))
            first, longest, total = row, length, length
    return [*groups, slice(first, len(lengths))] if lengths else []


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` entries of rows of the page table, as `[rows, Hkv, length, D]`."""
    _, heads, page_size, dim = cache.shape
    rows, count = len(table), -(-length // page_size)
    # Entries behind a row's own pages are stale, and may name no page of this cache.
    pages = table[:, :count].reshape(-1).clamp(0, len(cache) - 1)
    taken = cache.index_select(0, pages).view(rows, count, heads, page_size, dim).transpose(1, 2)
    return taken.reshape(rows, heads, count * page_size, dim)[:, :, :length]


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    lengths: list[int],
    rows: slice,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """One query token a row: the heads of a group are the rows of one product over their keys."""
    mine = lengths[rows]
    longest = max(mine)
    if longest == 0:
        out[rows] = 0
        return
    table = meta.page_table[meta.seq_slots[rows].clamp_min(0)]
    k, v = _gather(k_cache, table, longest), _gather(v_cache, table, longest)
    mask = None
    if min(mine) < longest or 0 < window < longest:
        counts = meta.seq_lens[rows].view(-1, 1, 1, 1)
        keys = torch.arange(longest)
        mask = keys < counts
        if window:
            mask &= counts - 1 - keys < window
        # What lies there may be anything, and 0 · NaN is NaN.
        beyond = ~mask.transpose(-1, -2)
        k, v = k.masked_fill_(beyond, 0.0), v.masked_fill_(beyond, 0.0)
        if min(mine) == 0:
            mask |= counts == 0
    grouped = q[rows].view(len(mine), k.shape[1], -1, q.shape[-1])
    attended = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    out[rows] = attended.reshape(len(mine), -1, q.shape[-1])


def _chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """The last `n` positions `q [n, Hq, D]` of one sequence over its last keys `[1, Hkv, L, D]`, all that they see."""
    tokens, length = len(q), k.shape[2]
    if tokens == length and not 0 < window < length:
        mask, causal = None, True
    else:
        position, keys = torch.arange(length - tokens, length)[:, None], torch.arange(length)
        mask, causal = keys <= position, False
        if window:
            mask &= position - keys < window
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=causal, scale=scale
    )
    return attended[0].transpose(0, 1)


def rows_support(target: Target) -> str | None:
    """Floats on a CPU where the C function is compiled, or can be."""
    return _takes(target) or cc.refusal(ROWS_LIBRARY)


def attend_rows(
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
    """The same where a token's bits may not depend on the batch: each token by itself, over the keys up to its own.

    Raises ValueError for heads beyond ROWS_MOST_DIM.
    """
    out = torch.zeros_like(q) if out is None else out.zero_()
    if q.shape[2] > ROWS_MOST_DIM:
        raise ValueError(f"heads of {q.shape[2]} values are more than {ROWS_MOST_DIM}")
    refuse_tape("attention in one order")
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    starts = meta.query_start.tolist()
    gain = None if sinks is None else sinks.float().contiguous()
    for row, length in enumerate(meta.seq_lens.tolist()):
        tokens = slice(row, row + 1) if row < meta.num_decodes else slice(starts[row], starts[row + 1])
        if length and tokens.start < tokens.stop:
            k, v = cache.gather(meta.page_table[meta.seq_slots[row : row + 1].long()], length)
            out[tokens] = rows_attended(
                q[tokens].float(), k[0], v[0], gain, scale=scale, window=window, softcap=softcap,
                slopes=slopes, pattern=pattern,
            )  # fmt: skip
    return out


def rows_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    pattern: BlockPattern | None = None,
) -> Tensor:
    """The last n positions `q [n, Hq, D]` of one sequence over its keys `[Hkv, L, D]`, all fp32."""
    (tokens, heads, dim), (kv_heads, keys, _) = q.shape, k.shape
    q, k, v = (functional.pad(each, (0, -dim % ROWS_LANES)).contiguous() for each in (q, k, v))
    out = torch.empty_like(q)
    threads = torch.get_num_threads() if tokens * heads * keys * dim >= ROWS_THREAD_PRODUCTS else 1
    long = ctypes.c_long
    parts = (0,) * 5 if pattern is None else astuple(pattern)
    done = cc.library(ROWS_LIBRARY).stoker_attend_rows(
        _at(q), _at(k), _at(v), None if sinks is None else _at(sinks), None if slopes is None else _at(slopes),
        _at(out), long(tokens), long(heads), long(kv_heads), long(keys), long(q.shape[2]), long(window),
        *map(long, parts), ctypes.c_float(scale), ctypes.c_float(softcap), threads,
    )  # fmt: skip
    if not done:
        raise MemoryError(f"no memory for the scores of {keys} keys")
    return out[..., :dim]


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
