"""Attention with a shared prefix in PyTorch: the oracle of the kernels' tests, and the way on a CPU.

Invariants: it reads the pages that the step names, the shared ones from the first row's line and the others from the
table without them, so a wrong cut shows. Knows nothing of graphs: it reads lengths on the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.attention.shared_prefix.space import PrefixSpace


def cut_prefix(meta: AttentionMeta, space: PrefixSpace) -> None:
    """`stoker_kernels.attention.shared_prefix.op.cut_prefix`, what it writes, on any device."""
    shared, rows, page_size = int(space.keys), meta.num_decodes, space.sizes.page_size
    space.lens[:rows] = (meta.seq_lens - shared).clamp_min(0)
    pages = shared // page_size
    for row, (slot, keys) in enumerate(zip(meta.seq_slots.tolist(), space.lens[:rows].tolist(), strict=True)):
        own = -(-keys // page_size)
        if own:
            space.table[row, :own] = meta.page_table[slot, pages : pages + own]


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.attention.shared_prefix.op.shared_prefix_attention` on any device."""
    shared = meta.shared
    assert shared is not None, "the step has no shared prefix"
    keys, rows = int(shared.keys), meta.num_decodes
    pages = keys // k_cache.shape[2]
    own = meta.page_table[meta.seq_slots.long()]
    first = shared.page_table[shared.seq_slots[:1].long(), :pages].expand(rows, -1)
    whole = replace(
        meta,
        page_table=torch.cat((first, own), 1),
        seq_slots=torch.arange(rows, dtype=torch.int32, device=q.device),
        seq_lens=torch.where(meta.seq_lens > 0, meta.seq_lens + keys, 0),
        shared=None,
    )
    return reference_attention(q, k_cache, v_cache, whole, scale=scale, k_scale=k_scale, v_scale=v_scale, out=out)
