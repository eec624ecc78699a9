"""Latent attention on a CPU where a token's bits do not depend on the batch: every token is absorbed, by itself.

A prompt's token is computed as one that decodes: its queries are brought to latents, it attends to those up to its own,
and what it attended is brought back.
Invariants: products as of `launch/cpu_dot.py`, attention as of `attention.cpu_attention.attend_rows`: all sums fp32, in
one order. Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, rows_attended
from stoker_kernels.latent_attention import reference
from stoker_kernels.latent_attention.shapes import sizes_of
from stoker_kernels.launch.cpu_dot import dot
from stoker_kernels.launch.each_row import each_row

latent_rope_write = each_row(reference.latent_rope_write, "q", "latents", "positions", "slot_mapping")


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
    """`stoker_kernels.latent_attention.op.latent_attention`; `own` is read from the cache."""
    del own
    reference.check_scale(cache, cache_scale)
    sizes = sizes_of(q, cache, kv_b)
    out = q.new_zeros(q.shape[0], sizes.heads, sizes.value)
    heads = range(sizes.heads)
    still, turned = q.float().split((sizes.nope, sizes.rope), dim=-1)
    moved = [dot(still[:, head], kv_b[head, : sizes.nope].t().float()) for head in heads]
    absorbed = torch.cat((torch.stack(moved, dim=1), turned), dim=-1)
    starts = meta.query_start.tolist()
    for row, length in enumerate(meta.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if length == 0 or tokens.start == tokens.stop:
            continue
        keys = reference.gathered(cache, meta.page_table[meta.seq_slots[row].long()], length, cache_scale).float()[None]
        # The rotated part of a key is no part of what is attended.
        attended = rows_attended(absorbed[tokens], keys, keys, scale=scale)[..., : sizes.rank]
        for head in heads:
            out[tokens, head] = dot(attended[:, head], kv_b[head, sizes.nope :].float()).to(q.dtype)
    return out
