"""Chooses the attention kernels of a step on a GPU: Hopper's own where they take it (`sm90_*`), else Triton's.

Invariants: the choice depends on host integers and on what is built alone, so that a captured graph holds it; a step
that was planned for one kind of kernel and is run by another is planned anew.
Knows nothing of how a kernel is launched.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.attention import sm90_decode, sm90_mixed, sm90_prefill
from stoker_kernels.attention.config import (
    WIDE_TOKENS,
    decode_config,
    mixed_stream_config,
    prefers_one_launch,
    prefers_wide_tiles,
    prefill_config,
    stream_config,
)
from stoker_kernels.attention.inputs import BlockPattern, Inputs, inputs_of
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.triton_launch import launch_decode, launch_plan, launch_prefill
from stoker_kernels.launch.cuda import missing_cubin
from stoker_kernels.launch.dispatch import sm_of


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
    attend(inputs, meta)
    return inputs.out


def attend(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run the kernels that the step takes, into `inputs.out`."""
    tokens, rows = inputs.q.shape[0], meta.seq_lens.shape[0]
    if _in_one_launch(inputs, meta):
        _mixed(inputs, meta)
        return
    if meta.num_decodes > 0:
        _decode(inputs, meta)
    if meta.num_decodes < rows or tokens > meta.num_decodes:
        _prefill(inputs, meta)


def _by_shares(inputs: Inputs) -> bool:
    """Whether steps of this model are planned for the CUDA kernels."""
    return sm90_decode.available(inputs.q.device, inputs.kv_dtype, inputs.q.shape[2], inputs.group)


def _in_one_launch(inputs: Inputs, meta: AttentionMeta) -> bool:
    tokens = inputs.q.shape[0] - meta.num_decodes
    return (
        prefers_one_launch(inputs.kv_bytes, meta.num_decodes, tokens)
        and _by_shares(inputs)
        and sm90_mixed.refusal(inputs, meta) is None
    )


def _mixed(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run decode rows, chunks and padding together, after the plans unless the step has made them."""
    plan_window = meta.planned_window if meta.planned_tiles else None
    settled = meta.settled and plan_window is not None
    if plan_window is None:
        plan_window = inputs.window
        sm90_mixed.plan_tiles(meta, inputs.q.shape[0], inputs.group)
        if meta.num_decodes > 0:
            config = mixed_stream_config(inputs.kv_bytes)
            sm90_decode.plan_shares(meta, inputs.k_cache.shape[1], plan_window, config)
    sm90_mixed.launch_mixed(inputs, meta, plan_window, settled=settled)


def _decode(inputs: Inputs, meta: AttentionMeta) -> None:
    """Plan the decode rows, unless the step's plan is there and of the right kind, and run them."""
    num_kv_heads, head_dim = inputs.k_cache.shape[1], inputs.q.shape[2]
    kv_bytes, device = inputs.kv_bytes, inputs.q.device
    if _by_shares(inputs) and sm90_decode.cache_refusal(inputs) is None:
        shares = stream_config(kv_bytes, inputs.group)
        plan_window = meta.planned_window if meta.planned_shares and not meta.planned_tiles else None
        settled = meta.settled and plan_window is not None
        if plan_window is None:
            plan_window = inputs.window
            sm90_decode.plan_shares(meta, num_kv_heads, plan_window, shares)
        sm90_decode.launch_streams(inputs, meta, plan_window, shares, settled=settled)
        return
    config = decode_config(head_dim, kv_bytes, sm_of(device), meta.num_decodes * num_kv_heads)
    if meta.planned_window is None or not meta.planned_items:
        launch_plan(meta, num_kv_heads, inputs.window, config)
    launch_decode(inputs, meta, config)


def _prefill(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run the chunks and the padding."""
    q = inputs.q
    tokens = q.shape[0] - meta.num_decodes
    if prefers_wide_tiles(tokens) and sm90_prefill.refusal(inputs) is None:
        sm90_prefill.launch_tiles(inputs, meta)
        return
    mean_tokens = tokens // max(1, meta.seq_lens.shape[0] - meta.num_decodes)
    launch_prefill(inputs, meta, prefill_config(q.shape[2], inputs.kv_bytes, sm_of(q.device), mean_tokens))


def describe_kernels(
    device: torch.device,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    softcap: float = 0.0,
    *,
    slopes: bool = False,
    patterns: bool = False,
) -> str:
    """`stoker_kernels.attention.op.attention_kernels` on a GPU."""
    refused = sm90_decode.model_refusal(device, kv_dtype, head_dim, group)
    refused = "takes no slopes (ALiBi)" if slopes and refused is None else refused
    if refused is not None:
        return f"triton; no sm90_decode: {refused}" if sm_of(device) == 90 else "triton"
    arch = sm90_decode.ARCH

    def found(stem: str, use: str) -> str:
        missing = missing_cubin(stem, arch)
        return f"{stem} {use}" if missing is None else f"no {stem}: {missing}"

    if patterns:
        return "sm90_decode; triton for layers that see some blocks alone, and for chunks"
    if softcap > 0.0:
        return "sm90_decode; triton for chunks: the kernels of SM 9.0 for them take no soft-cap"
    parts = ["sm90_decode", found(sm90_mixed.STEM, "with chunks")]
    if kv_dtype is torch.bfloat16:
        use = f"from {WIDE_TOKENS + 1} tokens of them without a window"
        parts += ["triton for chunks alone", found(sm90_prefill.STEM, use)]
    return "; ".join(parts)


def plan_attention(
    meta: AttentionMeta,
    *,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    window: int = 0,
    softcap: float = 0.0,
    slopes: bool = False,
    patterns: bool = False,
) -> AttentionMeta:
    """`stoker_kernels.attention.op.plan_attention` on a GPU."""
    device, streams = meta.seq_lens.device, meta.num_decodes * num_kv_heads
    group = meta.workspace.partial.shape[1] // num_kv_heads
    shares = not slopes and sm90_decode.available(device, kv_dtype, head_dim, group)
    items = streams > 0 and (patterns or not shares)
    tiles = (
        shares
        and softcap == 0.0
        and prefers_one_launch(kv_dtype.itemsize, meta.num_decodes, num_tokens - meta.num_decodes)
        and sm90_mixed.has_room(meta, num_tokens, group)
    )
    if tiles:
        sm90_mixed.plan_tiles(meta, num_tokens, group)
    if streams > 0 and shares:
        config = mixed_stream_config(kv_dtype.itemsize) if tiles else stream_config(kv_dtype.itemsize, group)
        sm90_decode.plan_shares(meta, num_kv_heads, window, config)
    if items:
        launch_plan(meta, num_kv_heads, window, decode_config(head_dim, kv_dtype.itemsize, sm_of(device), streams))
    return replace(meta, planned_window=window, planned_shares=shares, planned_items=items, planned_tiles=tiles)
