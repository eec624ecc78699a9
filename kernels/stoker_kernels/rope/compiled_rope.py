"""QK norm, RoPE and KV write on a CPU by csrc/cpu_rope.c: one call.

Invariants: as of the public op. What is rare on a CPU (pairs side by side, centred norms, caches of another type, heads
of no whole vectors) is left to `cpu_rope`.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.launch.compiled import LANES, TYPES, Kernel
from stoker_kernels.rope.cpu_rope import qk_norm_rope_kv_write as by_torch

_rope = Kernel("cpu_rope", "stoker_rope")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "positions", "places", "cos_sin", "k_cache", "v_cache", "q")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_long) for name in ("tokens", "q_heads", "kv_heads", "dim", "half", "page")),
        ("type", ctypes.c_int),
        ("norm_type", ctypes.c_int),
        ("eps", ctypes.c_float),
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
    out: Tensor | None = None,
    **rare: Any,
) -> Tensor:
    """Shapes as of the public op, whose other options are `rare`."""
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    if any(value is not None and value is not False for value in rare.values()) or not _takes(
        (qkv, k_cache, v_cache), (positions, slot_mapping, cos_sin), norms, head_dim, out
    ):
        return by_torch(
            qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, out=out, **rare,
        )  # fmt: skip
    tokens = qkv.shape[0]
    query = torch.empty((tokens, num_q_heads, head_dim), dtype=qkv.dtype) if out is None else out
    _rope(
        _Work(
            qkv.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), cos_sin.data_ptr(), k_cache.data_ptr(),
            v_cache.data_ptr(), query.data_ptr(), None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(), tokens, num_q_heads, num_kv_heads, head_dim,
            cos_sin.shape[1] // 2, k_cache.shape[2], TYPES[qkv.dtype], TYPES[norms[0].dtype] if norms else 0, eps,
        )
    )  # fmt: skip
    return query


def _takes(
    data: tuple[Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    norms: list[Tensor],
    head_dim: int,
    out: Tensor | None,
) -> bool:
    (qkv, k_cache, v_cache), (positions, places, table) = data, where
    return (
        head_dim % LANES == 0
        and table.shape[1] % (2 * LANES) == 0
        and table.shape[1] <= head_dim
        and qkv.dtype == k_cache.dtype == v_cache.dtype
        and (positions.dtype, places.dtype, table.dtype) == (torch.int32, torch.int64, torch.float32)
        and all(norm.dim() == 1 and norm.dtype == norms[0].dtype and norm.dtype in TYPES for norm in norms)
        and all(each.is_contiguous() for each in (*data, *where, *norms))
        and (out is None or (out.is_contiguous() and out.dtype == qkv.dtype))
    )
