"""Latent attention in two ops: `latent_rope_write` before it, `latent_attention` over pages.

Invariants: the cache of a token is its normed latent and its rotated key; `latent_attention` reads it as keys and, the
latent alone, as values. Rows and padding are as in `attention`: decodes first, a row with `seq_lens` 0 gives zeros, as
do tokens past `query_start[-1]`. Nothing is read back to the host on a GPU.
Knows nothing of how queries and latents were projected.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, rows_support
from stoker_kernels.launch import cpu_dot, cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import (
    Target,
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    require,
    select,
    triton_supports,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FOLDER = "stoker_kernels.latent_attention"
_takes = triton_supports(*_FLOATS)


def _supports(target: Target) -> str | None:
    if target.device == "cuda" and target.sm < 80:
        return "needs sm_80 or newer"
    return _takes(target)


def _rows_support(target: Target) -> str | None:
    return rows_support(target) or cpu_dot.refusal()


def _sm90_supports(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "made for SM 9.0"
    if target.dtype is not torch.bfloat16:
        return "takes bfloat16"
    missing = (cuda.missing_cubin(stem, "sm_90a") for stem in ("sm90_latent", "sm90_latent_e4m3"))
    return next(filter(None, missing), None) or _supports(target)


register("latent_rope_write", "triton", f"{_FOLDER}.triton_write:latent_rope_write", _supports)
register("latent_attention", "sm90", f"{_FOLDER}.sm90_latent:latent_attention", _sm90_supports)
register("latent_attention", "triton", f"{_FOLDER}.triton_launch:latent_attention", _supports)
register("latent_rope_write", "reference", f"{_FOLDER}.reference:latent_rope_write", reference_supports)
register("latent_attention", "cpu", f"{_FOLDER}.cpu_latent:latent_attention", cpu_supports(*_FLOATS))
register("latent_attention", "reference", f"{_FOLDER}.reference:latent_attention", reference_supports)
register_invariant("latent_rope_write", "rows", f"{_FOLDER}.rows:latent_rope_write", cpu_supports(*_FLOATS))
register_invariant("latent_attention", "rows", f"{_FOLDER}.rows:latent_attention", _rows_support)


def latent_rope_write(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    *,
    norm: Tensor,
    eps: float,
    interleaved: bool,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Norm latents, rotate their keys and the queries by position, write latents and keys to pages.

    `q [T,H,N+P]`: the last P of each head are rotated in place. `latents [T,R+P]`: R that are normed by `norm [R]`
    (RMS), then the key. `positions [T]` int32; `slot_mapping [T]` int64, page·B + offset, negative writes nothing;
    `cos_sin [max_pos,P]` fp32, cos in the first half; `cache [P,1,B,R+P]`. `interleaved` as in `rope`.
    cache_scale: fp32 [1], of a cache in e4m3, which holds what it is of, divided by it, clamped to ±448 and rounded.
    → what a token's cache is, of all tokens, `[T,R+P]` of q's dtype. On CUDA `positions` and `slot_mapping` have to be
    settled (`pdl.pdl_settle`).
    """
    own: Tensor = select("latent_rope_write", q.device, q.dtype)(
        q, latents, positions, slot_mapping, cos_sin, cache, norm=norm, eps=eps, interleaved=interleaved,
        cache_scale=cache_scale,
    )  # fmt: skip
    return own


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
    """Causal attention of `q [T,H,N+P]` over the latents `[P,1,B,R+P]` of the pages that `meta` names; → `[T,H,V]`.

    `kv_b [H,N+V,R]` widens a latent to a head's key, all but its rotated part, and value. Rows of one token are
    computed on latents as they are, by queries brought there (absorbed); chunks on keys and values widened from
    `own [T,R+P]`, what `latent_rope_write` gave, and what lies in pages before them absorbed, too. `cache_scale` as
    there.
    Raises ValueError for shapes that do not fit, KernelUnavailable.
    """
    o: Tensor = select("latent_attention", q.device, q.dtype)(
        q, own, cache, kv_b, meta, scale=scale, cache_scale=cache_scale
    )
    return o


def plan_latent_attention(
    meta: AttentionMeta, *, heads: int, rank: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionMeta:
    """Plan a step once for all its layers of `heads` heads and latents of `rank`: the meta for each call of it.

    `kv_dtype`: the cache's; None: `dtype`. Without the plan each call plans anew. `meta.seq_lens` must be final, and
    the workspace, of `heads` times `rank` values, serve no other step in between.
    """
    device = meta.seq_lens.device
    if device.type != "cuda":
        return replace(meta, planned_window=None)
    if require(device, dtype, ("latent_attention",))["latent_attention"] == "sm90":
        from stoker_kernels.latent_attention import sm90_latent

        return sm90_latent.plan(meta, heads, rank, dtype, dtype if kv_dtype is None else kv_dtype)
    from stoker_kernels.latent_attention.triton_launch import plan

    return plan(meta, heads, rank, dtype.itemsize)
