"""Latent attention on a CPU: decodes absorbed, chunks widened, in the type of the queries.

Invariants: sums of attention are fp32 in torch's own products; what is read of a page past a sequence's length has no
weight.
Knows nothing of graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.attention import AttentionMeta
from stoker_kernels.latent_attention.reference import check_scale, gathered
from stoker_kernels.latent_attention.shapes import Sizes, sizes_of


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
    """`stoker_kernels.latent_attention.op.latent_attention`; shapes as there."""
    check_scale(cache, cache_scale)
    sizes = sizes_of(q, cache, kv_b)
    out = q.new_zeros(q.shape[0], sizes.heads, sizes.value)
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    absorbed = _absorbed(q[: meta.num_decodes], kv_b, sizes)
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        if length == 0 or tokens.start == tokens.stop:
            continue
        latents = gathered(cache, meta.page_table[meta.seq_slots[row].long()], length, cache_scale).to(q.dtype)
        if row < meta.num_decodes:
            weights = torch.softmax((absorbed[row] @ latents.t()).float() * scale, dim=-1).to(q.dtype)
            attended = weights @ latents[:, : sizes.rank]
            out[row] = torch.bmm(kv_b[:, sizes.nope :], attended[..., None])[..., 0]
        else:
            out[tokens] = _chunk(q[tokens], latents, kv_b, sizes, scale)
    return out


def _absorbed(q: Tensor, kv_b: Tensor, sizes: Sizes) -> Tensor:
    """Queries `[T,H,N+P]` brought to where latents are: `[T,H,R+P]`."""
    still, turned = q.split((sizes.nope, sizes.rope), dim=-1)
    moved = torch.bmm(still.transpose(0, 1), kv_b[:, : sizes.nope]).transpose(0, 1)
    return torch.cat((moved, turned), dim=-1)


def _chunk(q: Tensor, latents: Tensor, kv_b: Tensor, sizes: Sizes, scale: float) -> Tensor:
    """The last `n` positions `q [n,H,N+P]` of one sequence over all its latents `[L,R+P]`: → `[n,H,V]`."""
    count, length = len(q), len(latents)
    latent, key = latents.split((sizes.rank, sizes.rope), dim=1)
    widened = functional.linear(latent, kv_b.flatten(0, 1)).view(length, sizes.heads, -1).transpose(0, 1)
    keys = torch.cat((widened[..., : sizes.nope], key.expand(sizes.heads, -1, -1)), dim=-1)
    seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
    values = widened[..., sizes.nope :]
    attended = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen, scale=scale)
    return attended.transpose(0, 1)
