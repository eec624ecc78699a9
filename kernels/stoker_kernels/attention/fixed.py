"""Attention on a GPU whose bits do not depend on the batch: host side of `triton_fixed.py`.

Invariants: tile, split and number of warps follow from the head dimension, the cache's type and the SM; what the batch
decides is which program merges. A launch's size depends on host integers alone, so that a captured graph serves any
lengths.
Knows nothing of what is faster where any bits will do (`choose.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from stoker_kernels.attention.config import SHORT_CHUNK, PrefillConfig, prefill_config
from stoker_kernels.attention.inputs import BlockPattern, Inputs, inputs_of
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.triton_fixed import fixed_kernel, fixed_plan_kernel
from stoker_kernels.attention.triton_launch import LOG2E, NO_WINDOW, exact, pattern_sizes, tile_dim
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.launch.triton_tile import padded_dim, unpack_of

SPLIT = 512  # keys; at 7B a program takes about three microseconds for them, and a prompt merges seldom enough
ITEMS_PER_SM = 8  # of a plan that cuts rows, over all KV heads: beyond, rows themselves are work enough


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a step's decode rows: items that a plan may have, programs to launch, where sums of weights begin."""

    capacity: int
    programs: int
    sums_from: int


def fixed_config(head_dim: int, kv_bytes: int, sm: int) -> PrefillConfig:
    """The one tile for a head dimension and a cache."""
    config = prefill_config(head_dim, kv_bytes, sm, SHORT_CHUNK)
    # Two sets of sums take the registers of twice as many threads where heads are wide, or e4m3 is unpacked besides.
    crowded = padded_dim(head_dim) >= (128 if kv_bytes == 1 else 256) and config.block_m == 64
    return replace(config, num_warps=8) if crowded else config


def sizes(meta: AttentionMeta, num_kv_heads: int) -> Sizes:
    """What the decode rows of a step take."""
    rows, space = meta.num_decodes, meta.workspace
    room = space.items.shape[0] // 2  # the largest scores lie in one half, the sums in the other
    more = min(rows * (triton.cdiv(meta.max_seq_len, SPLIT) - 1),
               ITEMS_PER_SM * sm_count(meta.seq_lens.device) // num_kv_heads)  # fmt: skip
    capacity = max(rows, min(rows + more, room))
    return Sizes(capacity, capacity * num_kv_heads if rows else 0, room * space.partial_lse.shape[1])


def plan_items(meta: AttentionMeta, num_kv_heads: int, window: int) -> None:
    """Write the items of this step's decode rows into the workspace."""
    space = meta.workspace
    fixed_plan_kernel[(1,)](
        meta.seq_lens,
        meta.seq_slots,
        space.items,
        space.num_items,
        meta.num_decodes,
        window,
        sizes(meta, num_kv_heads).capacity,
        SPLIT=SPLIT,
        BLOCK_ROWS=max(16, triton.next_power_of_2(meta.num_decodes)),
        num_warps=4,
        **launch_options(meta.seq_lens.device),
    )


def plan_attention(meta: AttentionMeta, *, num_kv_heads: int, window: int) -> AttentionMeta:
    """`stoker_kernels.attention.op.plan_attention` for this kernel."""
    if meta.num_decodes > 0:
        plan_items(meta, num_kv_heads, window)
    return replace(meta, planned_window=window)


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
    slopes: Tensor | None = None,
    pattern: BlockPattern | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.attention.op.paged_attention` on a GPU, or on CPU tensors in Triton's interpreter."""
    inputs = inputs_of(
        q, k_cache, v_cache, meta, scale=scale, window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
        sinks=sinks, slopes=slopes, pattern=pattern, out=out,
    )  # fmt: skip
    if meta.num_decodes > 0 and meta.planned_window is None:
        plan_items(meta, k_cache.shape[1], window)
    _launch(inputs, meta)
    return inputs.out


def _launch(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run decode rows, chunks and padding."""
    q, space, num_kv_heads, first = inputs.q, meta.workspace, inputs.k_cache.shape[1], meta.num_decodes
    rows, tokens = meta.seq_lens.shape[0] - first, q.shape[0]
    config = fixed_config(q.shape[2], inputs.kv_bytes, sm_of(q.device))
    block_m = max(config.block_m, triton.next_power_of_2(inputs.group))
    decodes = sizes(meta, num_kv_heads)
    tiles = (tokens - first) // (block_m // inputs.group) + rows + 1 if rows or tokens > first else 0
    cache, page = inputs.k_cache.stride(), 1 << inputs.page_shift
    fixed_kernel[(decodes.programs + tiles * num_kv_heads,)](
        q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        meta.page_table,
        meta.seq_slots,
        meta.query_start,
        meta.seq_lens,
        space.items,
        space.num_items,
        space.partial,
        space.partial_lse,
        space.arrivals,
        inputs.k_scale,
        inputs.v_scale,
        inputs.sinks,
        inputs.slopes,
        inputs.scale * LOG2E,
        inputs.softcap,
        NO_WINDOW if inputs.window == 0 and not exact(inputs) else inputs.window,
        num_kv_heads,
        rows,
        tokens,
        first,
        decodes.programs,
        decodes.sums_from,
        q.stride(0),
        inputs.out.stride(0),
        meta.page_table.stride(0),
        cache[0],
        cache[1],
        cache[2],
        inputs.group,
        q.shape[2],
        inputs.page_shift,
        *pattern_sizes(inputs),
        BLOCK_M=block_m,
        BLOCK_D=tile_dim(q.shape[2]) // (2 if inputs.fp8 else 1),
        BLOCK_N=config.block_n,
        SPLIT=SPLIT,
        STAGES=config.stages,
        EXACT=exact(inputs),
        WHOLE=exact(inputs) and page >= config.block_n,
        FP8=inputs.fp8,
        WINDOW=not exact(inputs) or inputs.window > 0,
        SOFTCAP=inputs.softcap > 0.0,
        SINKS=inputs.sinks is not None,
        SLOPES=inputs.slopes is not None,
        PATTERN=inputs.pattern is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        UNPACK=unpack_of(fp8=inputs.fp8, cvt=config.cvt),
        num_warps=config.num_warps,
        **launch_options(q.device),
    )
