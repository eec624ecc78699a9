"""Optional norm of q and k, RoPE and KV write in plain PyTorch: oracle and CPU backend.

Invariants: as of the public op; arithmetic is fp32 with one rounding, at the end; fp8 results are clamped first,
because torch's conversion gives NaN beyond the range.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.quant import FP8_MAX


def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    centred: bool = False,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Optional per-head norm of q and k, rotary embedding of both, k and v into their pages; returns q."""
    heads = qkv.float().view(-1, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = normed(q, q_norm, eps, centred)
    if k_norm is not None:
        k = normed(k, k_norm, eps, centred)
    table = cos_sin[positions.long()].unsqueeze(1)
    q, k = _rotate(q, table, interleaved), _rotate(k, table, interleaved)
    written = slot_mapping >= 0
    page_size = k_cache.shape[2]
    pages = slot_mapping[written] // page_size
    offsets = slot_mapping[written] % page_size
    k_cache[pages, :, offsets] = to_cache(k[written], k_cache.dtype, k_scale)
    v_cache[pages, :, offsets] = to_cache(v[written], v_cache.dtype, v_scale)
    return deliver(q, qkv.dtype, out)


def normed(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """The norm of each head of `x [T,heads,D]`, fp32; `weight` is `[D]`, or `[heads,D]`."""
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def to_cache(value: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Values `[T,Hkv,D]` as a cache of `dtype` stores them."""
    if scale is not None:
        value = value * scale.reciprocal().view(1, -1, 1)
    if dtype == torch.float8_e4m3fn:
        value = value.clamp(-FP8_MAX, FP8_MAX)
    return value.to(dtype)
