"""Random batches to check attention with, poisoned wherever the op must not read.

Invariants: a cache slot that no key of the batch fills holds NaN, and a page-table entry past a row's pages names no
page, so that reading either shows. The same seed gives the same batch on every device.
Knows nothing of what is checked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.attention.meta import AttentionMeta, attention_workspace

NO_PAGE = 1_000_000
READ_BLOCK = 64  # keys that are read together, at most


@dataclass(frozen=True)
class Shape:
    """Sizes of the cache and the heads; `cache` is the dtype of the one, `query` of the queries."""

    page: int = 16
    kv_heads: int = 2
    q_heads: int = 6
    dim: int = 32
    cache: torch.dtype = torch.float32
    query: torch.dtype = torch.float32

    @property
    def fp8(self) -> bool:
        """Whether the cache is e4m3, with scales."""
        return self.cache is torch.float8_e4m3fn


@dataclass(frozen=True)
class AttentionBatch:
    """The op's arguments, and the (query tokens, keys) they were made from."""

    q: Tensor
    k: Tensor
    v: Tensor
    meta: AttentionMeta
    rows: list[tuple[int, int]]
    scale: float
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `paged_attention`."""
        return {"scale": self.scale, "k_scale": self.k_scale, "v_scale": self.v_scale}


def random_batch(
    shape: Shape,
    rows: list[tuple[int, int]],
    *,
    decodes: int,
    padding: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """A batch of rows (query tokens, keys), the first `decodes` of one token; `padding` tokens follow the rows'."""
    generator = torch.Generator().manual_seed(seed)
    per_row = [-(-keys // shape.page) for _, keys in rows]
    pages = sum(per_row) + 2
    order = torch.randperm(pages, generator=generator)
    slots = torch.randperm(len(rows) + 3, generator=generator)[: len(rows)]
    table = torch.full((len(rows) + 3, max(per_row) + 2), NO_PAGE, dtype=torch.int32)
    filled = torch.zeros(pages, shape.page, dtype=torch.bool)
    for row, end in enumerate(itertools.accumulate(per_row)):
        own = order[end - per_row[row] : end]
        table[slots[row], : len(own)] = own.int()
        filled[own] = torch.arange(len(own) * shape.page).view(len(own), shape.page) < rows[row][1]
    size = (pages, shape.kv_heads, shape.page, shape.dim)
    k, v = (torch.randn(size, generator=generator) for _ in range(2))
    for cache in (k, v):
        cache[~filled[:, None, :, None].expand(size)] = float("nan")
    tokens = [count for count, _ in rows]
    q = torch.randn(sum(tokens) + padding, shape.q_heads, shape.dim, generator=generator)
    k_scale, v_scale = (torch.rand(2, shape.kv_heads, generator=generator) + 0.5).to(device)
    meta = AttentionMeta(
        table.to(device),
        slots.int().to(device),
        torch.tensor([0, *itertools.accumulate(tokens)], dtype=torch.int32, device=device),
        torch.tensor([keys for _, keys in rows], dtype=torch.int32, device=device),
        decodes,
        max(tokens),
        max(keys for _, keys in rows),
        attention_workspace(len(rows), shape.q_heads, shape.dim, device),
    )
    return AttentionBatch(
        q.to(device, shape.query),
        k.to(shape.cache).to(device),
        v.to(shape.cache).to(device),
        meta,
        rows,
        shape.dim**-0.5,
        k_scale if shape.fp8 else None,
        v_scale if shape.fp8 else None,
    )


def give_up(batch: AttentionBatch, window: int) -> AttentionBatch:
    """The batch where pages that lie behind their row's window were given up, those of the first block it reads apart.

    They are NaN, and the table names no page in their places.
    """
    size, table = batch.k.shape[2], batch.meta.page_table.clone()
    k, v = batch.k.clone(), batch.v.clone()
    gone: list[int] = []
    for slot, (tokens, keys) in zip(batch.meta.seq_slots.tolist(), batch.rows, strict=True):
        behind = max(keys - tokens - window + 1, 0) // READ_BLOCK * READ_BLOCK // size
        gone += table[slot, :behind].tolist()
        table[slot, :behind] = NO_PAGE
    assert gone, "nothing is out of sight"
    for cache in (k, v):
        # By 8 bits where they are e4m3, of which not all operations know: 0x7F is NaN.
        bits = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
        bits[gone] = 0x7F if cache.dtype is torch.float8_e4m3fn else float("nan")
    return replace(batch, k=k, v=v, meta=replace(batch.meta, page_table=table))
