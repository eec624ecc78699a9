"""QK norm, RoPE and KV write on a CPU in few operations: the oracle's arithmetic on q and k at once.

Invariants: as of the public op; arithmetic is fp32 with one rounding, at the end.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.rope.reference import normed, to_cache
from stoker_kernels.rope.reference import qk_norm_rope_kv_write as reference


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
    """Shapes as of the public op. Pairs side by side (GPT-J's) are rare, and left to the reference."""
    if interleaved:
        return reference(
            qkv, positions, slot_mapping, cos_sin, k_cache, v_cache,
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm,
            eps=eps, centred=centred, interleaved=True, k_scale=k_scale, v_scale=v_scale, out=out,
        )  # fmt: skip
    heads = qkv.view(-1, num_q_heads + 2 * num_kv_heads, head_dim)
    turning = num_q_heads + num_kv_heads
    wide = heads[:, :turning].float()
    if q_norm is not None or k_norm is not None:
        parts = zip(wide.split((num_q_heads, num_kv_heads), dim=1), (q_norm, k_norm), strict=True)
        wide = torch.cat([part if norm is None else _normed(part, norm, eps, centred) for part, norm in parts], dim=1)
    turned = _rotate(wide, cos_sin.index_select(0, positions)[:, None])
    _write(k_cache, turned[:, num_q_heads:], slot_mapping, k_scale)
    _write(v_cache, heads[:, turning:], slot_mapping, v_scale)
    return deliver(turned[:, :num_q_heads], qkv.dtype, out).contiguous()


def _normed(heads: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    if centred or weight.dim() > 1:
        return normed(heads, weight, eps, centred)
    return functional.rms_norm(heads, weight.shape, weight.float(), eps)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """`x [T,H,D]` turned by `table [T,1,rot]`: cos, then sin."""
    rotary = table.shape[-1]
    half = rotary // 2
    cos, sin = table[..., :half], table[..., half:]
    first, second = x[..., :half], x[..., half:rotary]
    turned = torch.empty_like(x)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:rotary]).addcmul_(first, sin)
    if rotary < x.shape[-1]:
        turned[..., rotary:] = x[..., rotary:]
    return turned


def _write(cache: Tensor, values: Tensor, slot_mapping: Tensor, scale: Tensor | None) -> None:
    """`values [T,Hkv,D]` to their places in `cache [P,Hkv,B,D]`."""
    page_size = cache.shape[2]
    stored = to_cache(values, cache.dtype, scale)
    if len(slot_mapping) == 1:
        place = int(slot_mapping)
        if place >= 0:
            cache[place // page_size, :, place % page_size] = stored[0]
        return
    if int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        stored, slot_mapping = stored[written], slot_mapping[written]
    cache[slot_mapping // page_size, :, slot_mapping % page_size] = stored
