"""Latent attention between a layer's first projection and its last: queries widened, latents cached, heads attended.

Invariants: no branch on values and no wait for the device; what is quantized is what `q_b` reads, and latents and keys
in a cache of e4m3, which share a scale.
Knows nothing of pages, and of how attention over latents is computed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stoker_kernels.latent_attention import latent_attention, latent_rope_write
from stoker_kernels.norm import rms_norm, rms_norm_quant
from stoker_kernels.quant import AnyWeight, Quantized
from stoker_runtime.models.decoder_weights import LatentWeights
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.spec import ModelSpec

Linear = Callable[[Tensor | Quantized, AnyWeight, Tensor | None], Tensor]


def attend_latents(
    spec: ModelSpec,
    weights: LatentWeights,
    projected: Tensor,
    inputs: ForwardInputs,
    cache: Tensor,
    cos_sin: Tensor,
    linear: Linear,
    cache_scale: Tensor | None,
) -> Tensor:
    """`projected [T, queries + cached]` → the values of all heads side by side, `[T, H·V]`. Writes `cache`."""
    latent = spec.latent
    assert latent is not None, "a layer with latent attention is of a model that has it"
    queries = latent.queries(spec.heads)
    wide = projected[:, :queries]
    if weights.q_b is not None and weights.q_norm is not None:
        norm = rms_norm_quant if weights.q_b.takes_quantized else rms_norm
        wide = linear(norm(wide, weights.q_norm, latent.eps), weights.q_b, None)
    q = wide.unflatten(1, (spec.heads, latent.qk_head_dim))
    own = latent_rope_write(
        q,
        projected[:, queries:],
        inputs.positions,
        inputs.slot_mapping,
        cos_sin,
        cache,
        norm=weights.kv_norm,
        eps=latent.eps,
        interleaved=spec.rope.interleaved,
        cache_scale=cache_scale,
    )
    attended = latent_attention(
        q, own, cache, weights.kv_b, inputs.attention, scale=spec.attention_scale, cache_scale=cache_scale
    )
    return attended.flatten(1)
