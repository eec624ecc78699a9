"""Attention of decode rows on a CPU by csrc/cpu_attention.c, from the pages; chunks by torch (`cpu_attention`).

Invariants: as of the public op. What the C does not take (soft-caps, sinks, slopes, patterns, caches of another type,
heads of no whole vectors) goes to `cpu_attention`.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.attention.cpu_attention import chunks
from stoker_kernels.attention.cpu_attention import paged_attention as by_torch
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.launch.compiled import LANES, TYPES, Kernel

MOST_DIM = 256
# Rows times heads from which threads share them: within a step helpers are awake.
THREAD_PARTS = 8


_attention_decode = Kernel("cpu_attention", "stoker_attention_decode")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "out", "table", "slots", "lengths")),
        *((name, ctypes.c_long) for name in ("stride", "rows", "q_heads", "kv_heads", "dim", "page", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("type", "threads")),
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    **rare: Any,
) -> Tensor:
    """`stoker_kernels.attention.op.paged_attention`, whose other options are `rare`."""
    if any(rare[name] for name in rare if name == "softcap") or any(
        rare[name] is not None for name in rare if name != "softcap"
    ):
        return by_torch(q, k_cache, v_cache, meta, scale=scale, window=window, out=out, **rare)
    y = torch.empty_like(q) if out is None else out
    if not _takes(q, k_cache, v_cache, y, meta):
        return by_torch(q, k_cache, v_cache, meta, scale=scale, window=window, out=out)
    if meta.num_decodes:
        _decode(q, k_cache, v_cache, meta, scale, window, y)
    if len(q) > meta.num_decodes or len(meta.seq_slots) > meta.num_decodes:
        chunks(q, k_cache, v_cache, meta, meta.seq_lens.tolist(), scale, window, y)
    return y


def _takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, meta: AttentionMeta) -> bool:
    return (
        q.shape[-1] % LANES == 0
        and q.shape[-1] <= MOST_DIM
        and q.dtype == k_cache.dtype == v_cache.dtype == out.dtype
        and all(each.is_contiguous() for each in (q, k_cache, v_cache, out))
        and all(
            each.dtype == torch.int32 and each.stride(-1) == 1
            for each in (meta.page_table, meta.seq_slots, meta.seq_lens)
        )
    )


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int, out: Tensor
) -> None:
    heads, rows = q.shape[1], meta.num_decodes
    threads = torch.get_num_threads() if rows * heads >= THREAD_PARTS else 1
    work = _Work(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), meta.page_table.data_ptr(),
        meta.seq_slots.data_ptr(), meta.seq_lens.data_ptr(), meta.page_table.stride(0), rows, heads, k_cache.shape[1],
        q.shape[2], k_cache.shape[2], window, scale, TYPES[q.dtype],
        threads,
    )  # fmt: skip
    _attention_decode(work)
