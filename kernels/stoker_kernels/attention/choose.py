"""Launches the Triton attention kernels: plan and decode for the rows of one token, prefill for the rest.

Invariants: launch sizes depend on host integers alone (rows, tokens, bounds), so that a captured graph serves any
lengths. Knows nothing of dispatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from stoker_kernels.attention import sm90_decode as attention_sm90
from stoker_kernels.attention import sm90_mixed as attention_sm90_mixed
from stoker_kernels.attention import sm90_prefill as attention_sm90_prefill
from stoker_kernels.attention.config import (
    WIDE_TOKENS,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    mixed_stream_config,
    padded_dim,
    prefers_one_launch,
    prefers_wide_tiles,
    prefill_config,
    stream_config,
)
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.triton_decode import decode_kernel, decode_plan_kernel
from stoker_kernels.attention.triton_prefill import prefill_kernel
from stoker_kernels.attention.triton_tiles import UNPACK_CVT, UNPACK_PAIRS, UNPACK_PLAIN
from stoker_kernels.launch.cuda import missing_cubin
from stoker_kernels.launch.dispatch import interpreting, sm_of
from stoker_kernels.launch.pdl import launch_options

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The op's tensors and scalars, checked; caches of e4m3 are viewed as uint16 pairs."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    sinks: Tensor | None
    scale: float
    window: int
    softcap: float
    fp8: bool

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the cache holds, whatever it is viewed as."""
        return torch.float8_e4m3fn if self.fp8 else self.k_cache.dtype


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
    """`stoker_kernels.attention.op.paged_attention` on a GPU, or on CPU tensors in Triton's interpreter."""
    if out is None:
        out = torch.empty_like(q)
    fp8 = k_cache.dtype is torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    inputs = Inputs(q, k_cache, v_cache, out, k_scale, v_scale, sinks, scale, window, softcap, fp8)
    _check(inputs, meta)
    if _in_one_launch(inputs, meta):
        _mixed(inputs, meta)
        return out
    if meta.num_decodes > 0:
        _decode(inputs, meta)
    if meta.num_decodes < meta.seq_lens.shape[0] or q.shape[0] > meta.num_decodes:
        _prefill(inputs, meta)
    return out


def _by_shares(inputs: Inputs) -> bool:
    """Whether steps of this model are planned for the CUDA kernels."""
    return attention_sm90.available(inputs.q.device, inputs.kv_dtype, inputs.q.shape[2], inputs.group)


def _in_one_launch(inputs: Inputs, meta: AttentionMeta) -> bool:
    tokens = inputs.q.shape[0] - meta.num_decodes
    return (
        prefers_one_launch(1 if inputs.fp8 else 2, meta.num_decodes, tokens)
        and _by_shares(inputs)
        and attention_sm90_mixed.refusal(inputs, meta) is None
    )


def _mixed(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run decode rows, chunks and padding together, after the plans unless the step has made them."""
    plan_window = meta.planned_window if meta.planned_tiles else None
    settled = meta.settled and plan_window is not None
    if plan_window is None:
        plan_window = inputs.window
        attention_sm90_mixed.plan_tiles(meta, inputs.q.shape[0], inputs.group)
        if meta.num_decodes > 0:
            config = mixed_stream_config(1 if inputs.fp8 else 2)
            attention_sm90.plan_shares(meta, inputs.k_cache.shape[1], plan_window, config)
    attention_sm90_mixed.launch_mixed(inputs, meta, plan_window, settled=settled)


def _decode(inputs: Inputs, meta: AttentionMeta) -> None:
    """Plan the decode rows, unless the step's plan is there and of the right kind, and run them."""
    num_kv_heads, head_dim = inputs.k_cache.shape[1], inputs.q.shape[2]
    kv_bytes, device = 1 if inputs.fp8 else inputs.k_cache.element_size(), inputs.q.device
    if _by_shares(inputs) and attention_sm90.cache_refusal(inputs) is None:
        shares = stream_config(kv_bytes, inputs.group)
        plan_window = meta.planned_window if meta.planned_shares and not meta.planned_tiles else None
        settled = meta.settled and plan_window is not None
        if plan_window is None:
            plan_window = inputs.window
            attention_sm90.plan_shares(meta, num_kv_heads, plan_window, shares)
        attention_sm90.launch_streams(inputs, meta, plan_window, shares, settled=settled)
        return
    config = decode_config(head_dim, kv_bytes, sm_of(device), meta.num_decodes * num_kv_heads)
    if meta.planned_window is None or meta.planned_shares:
        launch_plan(meta, num_kv_heads, inputs.window, config)
    launch_decode(inputs, meta, config)


def _prefill(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run the chunks and the padding."""
    q = inputs.q
    tokens = q.shape[0] - meta.num_decodes
    if prefers_wide_tiles(tokens) and attention_sm90_prefill.refusal(inputs) is None:
        attention_sm90_prefill.launch_tiles(inputs, meta)
        return
    mean_tokens = tokens // max(1, meta.seq_lens.shape[0] - meta.num_decodes)
    kv_bytes = 1 if inputs.fp8 else inputs.k_cache.element_size()
    launch_prefill(inputs, meta, prefill_config(q.shape[2], kv_bytes, sm_of(q.device), mean_tokens))


def describe_kernels(device: torch.device, kv_dtype: torch.dtype, head_dim: int, group: int) -> str:
    """`stoker_kernels.attention.op.attention_kernels` on a GPU."""
    refused = attention_sm90.model_refusal(device, kv_dtype, head_dim, group)
    if refused is not None:
        return f"triton; no sm90_decode: {refused}" if sm_of(device) == 90 else "triton"
    arch = attention_sm90.ARCH

    def found(stem: str, use: str) -> str:
        missing = missing_cubin(stem, arch)
        return f"{stem} {use}" if missing is None else f"no {stem}: {missing}"

    parts = ["sm90_decode", found(attention_sm90_mixed.STEM, "with chunks")]
    if kv_dtype is torch.bfloat16:
        use = f"from {WIDE_TOKENS + 1} tokens of them without a window"
        parts += ["triton for chunks alone", found(attention_sm90_prefill.STEM, use)]
    return "; ".join(parts)


def plan_attention(
    meta: AttentionMeta, *, num_tokens: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype, window: int = 0
) -> AttentionMeta:
    """`stoker_kernels.attention.op.plan_attention` on a GPU."""
    device, streams = meta.seq_lens.device, meta.num_decodes * num_kv_heads
    group = meta.workspace.partial.shape[1] // num_kv_heads
    shares = attention_sm90.available(device, kv_dtype, head_dim, group)
    tiles = (
        shares
        and prefers_one_launch(kv_dtype.itemsize, meta.num_decodes, num_tokens - meta.num_decodes)
        and attention_sm90_mixed.has_room(meta, num_tokens, group)
    )
    if tiles:
        attention_sm90_mixed.plan_tiles(meta, num_tokens, group)
    if streams > 0 and shares:
        config = mixed_stream_config(kv_dtype.itemsize) if tiles else stream_config(kv_dtype.itemsize, group)
        attention_sm90.plan_shares(meta, num_kv_heads, window, config)
    elif streams > 0:
        launch_plan(meta, num_kv_heads, window, decode_config(head_dim, kv_dtype.itemsize, sm_of(device), streams))
    return replace(meta, planned_window=window, planned_shares=shares, planned_tiles=tiles)


def launch_plan(meta: AttentionMeta, num_kv_heads: int, window: int, config: DecodeConfig) -> None:
    """Write the decode items of this step into the workspace."""
    target, capacity = _item_bounds(meta, num_kv_heads, config)
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
    _, capacity = _item_bounds(meta, num_kv_heads, config)
    space = meta.workspace
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
        inputs.scale * LOG2E,
        inputs.softcap,
        inputs.window,
        num_kv_heads,
        *_strides(inputs, meta),
        BLOCK_M=max(16, triton.next_power_of_2(inputs.group)),
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        **_constants(inputs, config.cvt),
        num_warps=config.num_warps,
        **launch_options(inputs.q.device),
    )


def launch_prefill(inputs: Inputs, meta: AttentionMeta, config: PrefillConfig) -> None:
    """Run the rows from `num_decodes` on, and zero the tokens past the last row."""
    num_kv_heads = inputs.k_cache.shape[1]
    first = meta.num_decodes
    rows = meta.seq_lens.shape[0] - first
    tokens = inputs.q.shape[0]
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
        inputs.scale * LOG2E,
        inputs.softcap,
        inputs.window,
        num_kv_heads,
        rows,
        tokens,
        first,
        *_strides(inputs, meta),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        **_constants(inputs, config.cvt),
        num_warps=config.num_warps,
        **launch_options(inputs.q.device),
    )


def _item_bounds(meta: AttentionMeta, num_kv_heads: int, config: DecodeConfig) -> tuple[int, int]:
    """(target, capacity) of the plan: items for equal shares, and items at most."""
    programs = config.programs_per_sm * _sm_count(meta.seq_lens.device)
    target = max(1, programs // num_kv_heads)
    # No row gives more items than its keys fill, so a short bound needs a smaller launch.
    most = meta.num_decodes * max(1, triton.cdiv(meta.max_seq_len, config.min_split))
    capacity = meta.num_decodes + min(config.slack * target, most)
    return target, min(capacity, meta.workspace.items.shape[0])


@cache
def _sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 2  # the interpreter: any number is right, a small one makes small plans


def _strides(inputs: Inputs, meta: AttentionMeta) -> tuple[int, ...]:
    cache = inputs.k_cache.stride()
    return inputs.q.stride(0), inputs.out.stride(0), meta.page_table.stride(0), cache[0], cache[1], cache[2]


def _constants(inputs: Inputs, cvt: bool) -> dict[str, Any]:
    head_dim = inputs.q.shape[2]
    unpack = UNPACK_PLAIN if interpreting() else UNPACK_CVT if cvt else UNPACK_PAIRS
    return {
        "GROUP": inputs.group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_dim(head_dim) // (2 if inputs.fp8 else 1),
        "PAGE": inputs.k_cache.shape[2],
        "FP8": inputs.fp8,
        "WINDOW": inputs.window > 0,
        "SOFTCAP": inputs.softcap > 0.0,
        "SINKS": inputs.sinks is not None,
        "PRECISION": "ieee" if inputs.q.dtype is torch.float32 else "tf32",
        "UNPACK": unpack.value if inputs.fp8 else 0,
    }


def _check(inputs: Inputs, meta: AttentionMeta) -> None:
    """Raise ValueError for inputs the kernels would misread."""
    q, k, v, out = inputs.q, inputs.k_cache, inputs.v_cache, inputs.out
    page = k.shape[2]
    checks = [
        (q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads do not divide into {k.shape[1]} KV heads"),
        (k.stride() == v.stride() and k.stride(3) == 1, "k_cache and v_cache need equal strides, the last of them 1"),
        (q.stride(2) == 1 and q.stride(1) == q.shape[2], "q's heads must be contiguous in a token"),
        (out.stride(2) == 1 and out.stride(1) == q.shape[2], "out's heads must be contiguous in a token"),
        (page & (page - 1) == 0 and page >= 16, f"page size {page} is not a power of two from 16 on"),
        (inputs.fp8 == (inputs.k_scale is not None), "an e4m3 cache needs k_scale, and no other takes it"),
        (inputs.fp8 == (inputs.v_scale is not None), "an e4m3 cache needs v_scale, and no other takes it"),
        (inputs.fp8 or k.dtype == q.dtype, f"q is {q.dtype} but the cache {k.dtype}"),
        (
            meta.planned_window in (None, 0) or 0 < inputs.window <= (meta.planned_window or 0),
            f"the step was planned for window {meta.planned_window}, narrower than {inputs.window}",
        ),
    ]
    for good, message in checks:
        if not good:
            raise ValueError(f"paged_attention: {message}")
