"""What stands between the QKV projection and attention, in one launch: QK norm, rotary embedding, KV write.

Invariants: q, k and v are read from the merged projection once; arithmetic is fp32 with one rounding at the
end; a token whose slot mapping is negative leaves the cache untouched. A fp8 cache is written saturated,
never as NaN.
Knows nothing of page tables: the slot mapping is already page * page_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.compiled import compiled_supports
from stoker_kernels.launch.dispatch import (
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)

register(
    "qk_norm_rope_kv_write",
    "triton",
    "stoker_kernels.rope.triton_rope:qk_norm_rope_kv_write",
    triton_supports(torch.bfloat16, torch.float16, torch.float32),
)
register(
    "qk_norm_rope_kv_write",
    "compiled",
    "stoker_kernels.rope.compiled_rope:qk_norm_rope_kv_write",
    compiled_supports("cpu_rope"),
)
register(
    "qk_norm_rope_kv_write",
    "cpu",
    "stoker_kernels.rope.cpu_rope:qk_norm_rope_kv_write",
    cpu_supports(torch.bfloat16, torch.float16, torch.float32),
)
register(
    "qk_norm_rope_kv_write",
    "reference",
    "stoker_kernels.rope.reference:qk_norm_rope_kv_write",
    reference_supports,
)
register_invariant(
    "qk_norm_rope_kv_write",
    "one_block",
    "stoker_kernels.rope.triton_rope:in_one_block",
    triton_supports(torch.bfloat16, torch.float16, torch.float32),
)
register_invariant(
    "qk_norm_rope_kv_write",
    "rows",
    "stoker_kernels.rope.rows:qk_norm_rope_kv_write",
    cpu_supports(torch.bfloat16, torch.float16, torch.float32),
)


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
    """Norm q and k per head, rotate both by position (Su et al. 2021), write k and v to pages, return q.

    Shapes: `qkv [T,(Hq+2Hkv)·D]`, bias already in; `positions [T]` int32; `slot_mapping [T]` int64, page·B
    + offset, negative writes nothing; `cos_sin [max_pos, rot]` fp32, cos in the first half, `rot ≤ D` even
    is partial rotary; caches `[P,Hkv,B,D]` of fp32, fp16, bf16 or fp8 e4m3 with `k_scale`, `v_scale`
    `[Hkv]` fp32 (stored = value / scale); `q_norm`, `k_norm` `[D]`, or a weight for each head, `[Hq,D]` and `[Hkv,D]`
    → q `[T,Hq,D]`. The norm is by the root of the mean square; `centred` takes the mean off first. Nothing rotates
    where `rot` is 0. `interleaved` pairs dimensions (2i, 2i+1) as GPT-J does; otherwise (i, i + rot/2) as Llama and
    NeoX do. On CUDA `positions` and `slot_mapping` are read ahead of the op's turn: they have to be settled
    (`pdl.pdl_settle`).
    """
    q: Tensor = select("qk_norm_rope_kv_write", qkv.device, qkv.dtype)(
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        k_cache,
        v_cache,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        centred=centred,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )
    return q
