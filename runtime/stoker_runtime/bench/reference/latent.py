"""Latent attention once more, as plainly as PyTorch can say it: a part of the oracle `reference.model`.

Invariants: fp32 throughout; every token's latent is widened to the keys and values of all heads, which nothing but the
weights has in common with how the engine attends.
Knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.quant import AnyWeight
from stoker_runtime.models.decoder_weights import LatentWeights
from stoker_runtime.models.spec import ModelSpec

Linear = Callable[[Tensor, AnyWeight, Tensor | None], Tensor]
Rotate = Callable[[Tensor], Tensor]


def latent_heads(spec: ModelSpec, weights: LatentWeights, projected: Tensor, linear: Linear, rotate: Rotate) -> Tensor:
    """`projected [T, queries + cached]` → what the heads attend to, side by side `[T, H·V]`."""
    latent, count = spec.latent, len(projected)
    assert latent is not None, "latent attention has its sizes"
    parts = (latent.queries(spec.heads), latent.kv_lora_rank, latent.qk_rope_head_dim)
    wide, narrow, key = projected.split(parts, dim=1)
    if weights.q_b is not None and weights.q_norm is not None:
        wide = linear(_rms(wide, weights.q_norm, latent.eps), weights.q_b, None)
    q = wide.unflatten(1, (spec.heads, latent.qk_head_dim))
    still, turned = q.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), dim=-1)
    narrow = _rms(narrow, weights.kv_norm, latent.eps)
    widened = torch.einsum("tr,hdr->thd", narrow, weights.kv_b.float())
    keys, values = widened.split((latent.qk_nope_head_dim, latent.v_head_dim), dim=-1)
    scores = torch.einsum("thd,shd->hts", still, keys)
    scores = scores + torch.einsum("thd,sd->hts", rotate(turned), rotate(key[:, None])[:, 0])
    at = torch.arange(count, device=projected.device)
    scores = (scores * spec.attention_scale).masked_fill(at[None, :] > at[:, None], float("-inf"))
    return torch.einsum("hts,shv->thv", scores.softmax(-1), values).flatten(1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
