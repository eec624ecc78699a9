"""Launches the Triton attention kernels: plan and decode for the rows of one token, prefill for the rest.

Invariants: launch sizes depend on host integers alone (rows, tokens, bounds), so that a captured graph serves any
lengths. Knows nothing of when these kernels run and when others do (`choose.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from stoker_kernels.attention.config import (
    SHORT_CHUNK,
    DecodeConfig,
    PrefillConfig,
    prefill_config,
    rare_decode_config,
)
from stoker_kernels.attention.inputs import Inputs
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.triton_decode import decode_kernel, decode_plan_kernel
from stoker_kernels.attention.triton_prefill import prefill_kernel
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.launch.triton_tile import padded_dim, unpack_of

LOG2E = math.log2(math.e)
# Head dimensions with kernels of their own; others run in a tile of at least the smallest, its rest masked.
EXACT_DIMS = (64, 128, 256)
# Shapes of which group and page are constants of a kernel, which is then 5% faster in prefill, and has tuned tiles.
TUNED_DIMS, TUNED_GROUPS, TUNED_PAGE = (64, 128), range(1, 9), 64
NO_WINDOW = 1 << 30  # keys: wider than any context


def launch_plan(meta: AttentionMeta, num_kv_heads: int, window: int, config: DecodeConfig) -> None:
    """Write the decode items of this step into the workspace."""
    target, capacity = item_bounds(meta, num_kv_heads, config)
    decode_plan_kernel[(1,)](
        meta.seq_lens,
        meta.seq_slots,
        meta.workspace.items,
        meta.workspace.num_items,
        meta.num_decodes,
        window,
        capacity,
        target,
        MIN_SPLIT=config.min_split,
        MAX_SPLIT=config.max_split,
        BLOCK_ROWS=max(16, triton.next_power_of_2(meta.num_decodes)),
        num_warps=4,
        **launch_options(meta.seq_lens.device),
    )


def launch_decode(inputs: Inputs, meta: AttentionMeta, config: DecodeConfig) -> None:
    """Run the planned decode items. The plan must be of the same configuration and number of KV heads."""
    num_kv_heads = inputs.k_cache.shape[1]
    _, capacity = item_bounds(meta, num_kv_heads, config)
    space, before = meta.workspace, inputs.before
    if not tuned(inputs):
        config = rare_decode_config(config, inputs.q.shape[2], inputs.kv_bytes, sm_of(inputs.q.device))
    decode_kernel[(capacity * num_kv_heads,)](
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        meta.page_table,
        space.items,
        space.num_items,
        space.partial,
        space.partial_lse,
        space.arrivals,
        inputs.k_scale,
        inputs.v_scale,
        inputs.sinks,
        inputs.slopes,
        *((None, None) if before is None else (before.values, before.lse)),
        inputs.scale * LOG2E,
        inputs.softcap,
        _window(inputs),
        num_kv_heads,
        *_strides(inputs, meta),
        *_sizes(inputs),
        *((0, 0) if before is None else (before.parts, before.lse.stride(0))),
        BLOCK_M=max(16, triton.next_power_of_2(inputs.group)),
        BLOCK_N=block_n(inputs, config),
        STAGES=config.stages,
        **_constants(inputs, config),
        BEFORE=before is not None,
        num_warps=config.num_warps,
        **launch_options(inputs.q.device),
    )


def launch_prefill(inputs: Inputs, meta: AttentionMeta, config: PrefillConfig) -> None:
    """Run the rows from `num_decodes` on, and zero the tokens past the last row."""
    num_kv_heads = inputs.k_cache.shape[1]
    first = meta.num_decodes
    rows = meta.seq_lens.shape[0] - first
    tokens = inputs.q.shape[0]
    if not tuned(inputs):
        config = prefill_config(inputs.q.shape[2], inputs.kv_bytes, sm_of(inputs.q.device), SHORT_CHUNK)
    block_m = max(config.block_m, triton.next_power_of_2(inputs.group))
    tiles = (tokens - first) // (block_m // inputs.group) + rows + 1
    prefill_kernel[(tiles * num_kv_heads,)](
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.out,
        meta.page_table,
        meta.seq_slots,
        meta.query_start,
        meta.seq_lens,
        inputs.k_scale,
        inputs.v_scale,
        inputs.sinks,
        inputs.slopes,
        inputs.scale * LOG2E,
        inputs.softcap,
        _window(inputs),
        num_kv_heads,
        rows,
        tokens,
        first,
        *_strides(inputs, meta),
        *_sizes(inputs),
        BLOCK_M=block_m,
        BLOCK_N=block_n(inputs, config),
        STAGES=config.stages,
        **_constants(inputs, config),
        num_warps=config.num_warps,
        **launch_options(inputs.q.device),
    )


def item_bounds(meta: AttentionMeta, num_kv_heads: int, config: DecodeConfig) -> tuple[int, int]:
    """(target, capacity) of the plan: items for equal shares, and items at most, which a launch has to cover."""
    programs = config.programs_per_sm * sm_count(meta.seq_lens.device)
    target = max(1, programs // num_kv_heads)
    # No row gives more items than its keys fill, so a short bound needs a smaller launch.
    most = meta.num_decodes * max(1, triton.cdiv(meta.max_seq_len, config.min_split))
    capacity = meta.num_decodes + min(config.slack * target, most)
    return target, min(capacity, meta.workspace.items.shape[0])


def _strides(inputs: Inputs, meta: AttentionMeta) -> tuple[int, ...]:
    cache = inputs.k_cache.stride()
    return inputs.q.stride(0), inputs.out.stride(0), meta.page_table.stride(0), cache[0], cache[1], cache[2]


def tuned(inputs: Inputs) -> bool:
    """Whether a launch is of the kind that has every tuned tile compiled; all others share one a head dimension."""
    plain = inputs.window == 0 and inputs.softcap == 0.0 and inputs.slopes is None and inputs.pattern is None
    plain = plain and inputs.before is None
    usual = inputs.q.shape[2] in TUNED_DIMS and inputs.group in TUNED_GROUPS and _page(inputs) == TUNED_PAGE
    return usual and exact(inputs) and plain


def exact(inputs: Inputs) -> bool:
    """Whether the head dimension has kernels of its own. fp32, which serves no speed, has none."""
    return inputs.q.shape[2] in EXACT_DIMS and inputs.q.dtype is not torch.float32


def tile_dim(head_dim: int) -> int:
    """The head dimension of the tile that holds `head_dim`."""
    return max(EXACT_DIMS[0], padded_dim(head_dim))


def _page(inputs: Inputs) -> int:
    return int(inputs.k_cache.shape[2])


def _window(inputs: Inputs) -> int:
    """What the kernel is told: a kernel for any head dimension has no form without a window."""
    return NO_WINDOW if inputs.window == 0 and not exact(inputs) else inputs.window


def block_n(inputs: Inputs, config: DecodeConfig | PrefillConfig) -> int:
    """Keys of a step of the loop: of one block where there is a pattern of them."""
    return config.block_n if inputs.pattern is None else min(config.block_n, inputs.pattern.block)


def pattern_sizes(inputs: Inputs) -> tuple[int, int, int, int, int]:
    """What the kernels are told of a pattern of blocks."""
    if (pattern := inputs.pattern) is None:
        return (0,) * 5
    return pattern.block.bit_length() - 1, pattern.local, pattern.stride, pattern.step, pattern.first_head


def _sizes(inputs: Inputs) -> tuple[int, ...]:
    return inputs.group, inputs.q.shape[2], inputs.page_shift, *pattern_sizes(inputs)


def _constants(inputs: Inputs, config: DecodeConfig | PrefillConfig) -> dict[str, Any]:
    return {
        "BLOCK_D": tile_dim(inputs.q.shape[2]) // (2 if inputs.fp8 else 1),
        "GROUP": inputs.group if tuned(inputs) else 0,
        "PAGE_SHIFT": inputs.page_shift if tuned(inputs) else 0,
        "EXACT": exact(inputs),
        "WHOLE": exact(inputs) and _page(inputs) >= block_n(inputs, config),
        "FP8": inputs.fp8,
        "WINDOW": not exact(inputs) or inputs.window > 0,
        "SOFTCAP": inputs.softcap > 0.0,
        "SINKS": inputs.sinks is not None,
        "SLOPES": inputs.slopes is not None,
        "PATTERN": inputs.pattern is not None,
        "PRECISION": "ieee" if inputs.q.dtype is torch.float32 else "tf32",
        "UNPACK": unpack_of(fp8=inputs.fp8, cvt=config.cvt),
    }
