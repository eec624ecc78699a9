"""Paged attention on a CPU where a token's bits do not depend on the batch: host side of csrc/cpu_rows.c.

Invariants: decode rows and chunks are one and the same: a token is attended to by itself, over the keys up to its own
position, whatever stands beside it. What the C function gets is contiguous and lies within its tensors.
Knows nothing of graphs, nor how the library was compiled (`launch.cc`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.reference import Cache
from stoker_kernels.launch import cc
from stoker_kernels.launch.dispatch import Target, cpu_supports

LIBRARY = "cpu_rows"
LANES, MOST_DIM = 16, 1024
# Products of queries and keys below which a second thread costs more than it brings.
THREAD_PRODUCTS = 1 << 20
_takes = cpu_supports(torch.bfloat16, torch.float16, torch.float32)


def supports(target: Target) -> str | None:
    """Floats on a CPU where the C function is compiled, or can be."""
    return _takes(target) or cc.refusal(LIBRARY)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.attention.op.paged_attention`; shapes as there. Raises ValueError for heads beyond MOST_DIM."""
    out = torch.zeros_like(q) if out is None else out.zero_()
    if q.shape[2] > MOST_DIM:
        raise ValueError(f"heads of {q.shape[2]} values are more than {MOST_DIM}")
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    starts = meta.query_start.tolist()
    gain = None if sinks is None else sinks.float().contiguous()
    for row, length in enumerate(meta.seq_lens.tolist()):
        tokens = slice(row, row + 1) if row < meta.num_decodes else slice(starts[row], starts[row + 1])
        if length and tokens.start < tokens.stop:
            k, v = cache.gather(meta.page_table[meta.seq_slots[row : row + 1].long()], length)
            out[tokens] = _attend(q[tokens].float(), k[0], v[0], gain, scale, window, softcap)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    """The last n positions `q [n, Hq, D]` of one sequence over its keys `[Hkv, L, D]`, all fp32."""
    (tokens, heads, dim), (kv_heads, keys, _) = q.shape, k.shape
    q, k, v = (functional.pad(each, (0, -dim % LANES)).contiguous() for each in (q, k, v))
    out = torch.empty_like(q)
    threads = torch.get_num_threads() if tokens * heads * keys * dim >= THREAD_PRODUCTS else 1
    long = ctypes.c_long
    done = cc.library(LIBRARY).stoker_attend_rows(
        _at(q), _at(k), _at(v), None if sinks is None else _at(sinks), _at(out), long(tokens), long(heads),
        long(kv_heads), long(keys), long(q.shape[2]), long(window),
        ctypes.c_float(scale), ctypes.c_float(softcap), threads,
    )  # fmt: skip
    if not done:
        raise MemoryError(f"no memory for the scores of {keys} keys")
    return out[..., :dim]


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
