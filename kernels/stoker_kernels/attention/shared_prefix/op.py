"""Decode attention with a shared prefix: `cut_prefix` once a step, `shared_prefix_attention` in each layer.

The keys of all rows begin with the same pages. Those are attended for all rows together, in tiles whose rows are
queries of different sequences; what a row has behind them is attended as ever, over a page table without them; and the
two results are merged by their log-sum-exp (cascade inference of FlashInfer; Hydragen, Juravsky et al. 2024).

Invariants: the number of shared keys lies on the device, so a captured graph is valid for any, 0 included; each row
that is not padding has a key of its own behind them. Nothing is read back to the host on a GPU.
Knows nothing of who shares pages, and of when it pays (`config.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.attention.meta import AttentionMeta, SharedPrefix
from stoker_kernels.attention.shared_prefix.space import PrefixSpace
from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

_FOLDER = "stoker_kernels.attention.shared_prefix"
_DTYPES = {
    "cut_prefix": (torch.int32,),
    "shared_prefix_attention": (torch.bfloat16, torch.float16, torch.float32),
}

for _op, _dtypes in _DTYPES.items():
    register(_op, "triton", f"{_FOLDER}.launch:{_op}", triton_supports(*_dtypes))
    register(_op, "reference", f"{_FOLDER}.reference:{_op}", reference_supports)


def cut_prefix(meta: AttentionMeta, space: PrefixSpace) -> AttentionMeta:
    """The step of decode rows `meta` without the `space.keys` keys that all its rows begin with, to be planned.

    Writes what each row has of its own into `space`: its pages behind the prefix, and how many keys lie there.
    Raises ValueError for a step with chunks, or of more rows than there is room for.
    """
    rows = meta.num_decodes
    if len(meta.seq_lens) != rows or rows > len(space.lens):
        raise ValueError(
            f"a prefix is shared by up to {len(space.lens)} decode rows; this step has {rows}, of {len(meta.seq_lens)} "
            "rows in all"
        )
    select("cut_prefix", space.table.device, space.table.dtype)(meta, space)
    shared = SharedPrefix(space.keys, meta.page_table, meta.seq_slots, space.results(rows))
    return replace(meta, page_table=space.table, seq_slots=space.rows[:rows], seq_lens=space.lens[:rows], shared=shared)


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
    """Attention of one token a row, `q [T, Hq, D]`, over all keys of its row; shapes as of `paged_attention`.

    `meta` is of `cut_prefix`, planned or not. Raises KernelUnavailable, and ValueError for a step that shares nothing
    and for what `paged_attention` refuses.
    """
    if meta.shared is None:
        raise ValueError("shared_prefix_attention: the step has no shared prefix; cut_prefix gives one")
    o: Tensor = select("shared_prefix_attention", q.device, q.dtype)(
        q, k_cache, v_cache, meta, scale=scale, k_scale=k_scale, v_scale=v_scale, out=out
    )
    return o
