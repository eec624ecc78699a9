"""Random steps of latent attention: pages out of order, and what is no token's poisoned."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, attention_workspace

NO_PAGE = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes as `latent_attention` names them."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    page: int = 16
    dtype: torch.dtype = torch.float32
    cache_scale: float = 0.0
    """Of a cache in e4m3; 0: the cache is of `dtype`."""


@dataclass(frozen=True)
class LatentBatch:
    """The arguments of `latent_attention`."""

    q: Tensor
    own: Tensor
    cache: Tensor
    kv_b: Tensor
    meta: AttentionMeta
    cache_scale: Tensor | None = None


def random_batch(
    shape: Shape,
    rows: list[tuple[int, int]],
    *,
    decodes: int,
    padding: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LatentBatch:
    """Rows of (query tokens, keys), the first `decodes` of one token; `padding` tokens behind them."""
    generator = torch.Generator().manual_seed(seed)
    width = shape.rank + shape.rope
    per_row = [-(-keys // shape.page) for _, keys in rows]
    pages = sum(per_row) + 2
    order = torch.randperm(pages, generator=generator)
    slots = torch.randperm(len(rows) + 3, generator=generator)[: len(rows)]
    table = torch.full((len(rows) + 3, max(per_row) + 2), NO_PAGE, dtype=torch.int32)
    tokens = [count for count, _ in rows]
    starts = [0, *itertools.accumulate(tokens)]
    cache = torch.full((pages, 1, shape.page, width), float("nan"))
    own = torch.full((starts[-1] + padding, width), float("nan"))
    for row, end in enumerate(itertools.accumulate(per_row)):
        mine = order[end - per_row[row] : end]
        table[slots[row], : len(mine)] = mine.int()
        count, keys = rows[row]
        latents = torch.randn(keys, width, generator=generator)
        held = torch.full((len(mine) * shape.page, width), float("nan"))
        held[:keys] = latents
        cache[mine, 0] = held.view(len(mine), shape.page, width)
        own[starts[row] : starts[row] + count] = latents[keys - count :] if keys else float("nan")
    q = torch.randn(starts[-1] + padding, shape.heads, shape.nope + shape.rope, generator=generator)
    kv_b = torch.randn(shape.heads, shape.nope + shape.value, shape.rank, generator=generator) * shape.rank**-0.5
    meta = AttentionMeta(
        table.to(device),
        slots.int().to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([keys for _, keys in rows], dtype=torch.int32, device=device),
        decodes,
        max(tokens),
        max(keys for _, keys in rows),
        attention_workspace(len(rows), shape.heads, shape.rank, device),
    )
    scale = torch.tensor([shape.cache_scale]) if shape.cache_scale else None
    if scale is not None:
        held = (cache / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        own = (own / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    q, own, cache, kv_b = (each.to(shape.dtype).to(device) for each in (q, own, cache, kv_b))
    if scale is not None:
        return LatentBatch(q, own, held.to(device), kv_b, meta, scale.to(device))
    return LatentBatch(q, own, cache, kv_b, meta)
