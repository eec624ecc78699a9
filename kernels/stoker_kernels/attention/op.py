"""Paged attention, one op for decode, prefill and mixed steps: `paged_attention(q, k_cache, v_cache, meta, ...)`.

Invariants: the step's own keys and values are in the cache before the op runs. Rows `[0, num_decodes)` have one query
token each and sit at tokens `[0, num_decodes)`; a row with `seq_lens` 0 is padding, its output is zero and it reads
no page. Tokens past `query_start[-1]` are padding too, with output zero. Nothing is read back to the host on a GPU, so
a captured graph stays valid for any lengths within the bounds `max_query_len` and `max_seq_len`.
Knows nothing of the page allocator, of positions (they follow from `seq_lens`) or of rotary embeddings.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.attention.cpu_attention import rows_support
from stoker_kernels.attention.inputs import BlockPattern
from stoker_kernels.attention.meta import (
    AttentionMeta,
    AttentionWorkspace,
    attention_workspace,
    attention_workspace_bytes,
)
from stoker_kernels.launch.compiled import compiled_supports
from stoker_kernels.launch.dispatch import (
    cpu_supports,
    invariance_demanded,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)

__all__ = [
    "AttentionMeta",
    "AttentionWorkspace",
    "BlockPattern",
    "attention_kernels",
    "attention_workspace",
    "attention_workspace_bytes",
    "paged_attention",
    "plan_attention",
    "split_decodes",
]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_supports = triton_supports(*_FLOATS)


register("paged_attention", "triton", "stoker_kernels.attention.choose:paged_attention", _supports)
register(
    "paged_attention",
    "compiled",
    "stoker_kernels.attention.compiled_attention:paged_attention",
    compiled_supports("cpu_attention"),
)
register("paged_attention", "cpu", "stoker_kernels.attention.cpu_attention:paged_attention", cpu_supports(*_FLOATS))
register("paged_attention", "reference", "stoker_kernels.attention.reference:reference_attention", reference_supports)
register_invariant("paged_attention", "fixed", "stoker_kernels.attention.fixed:paged_attention", _supports)
register_invariant("paged_attention", "rows", "stoker_kernels.attention.cpu_attention:attend_rows", rows_support)


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
    """Causal attention of `q [T, Hq, D]` over the pages `[P, Hkv, B, D]` named by `meta`; returns `[T, Hq, D]`.

    The logit of query position p and key j ≤ p is `q·k·scale`, then `softcap·tanh(logit/softcap)` if softcap > 0;
    with `window` > 0 only keys with p − j < window count. `sinks [Hq]` fp32 are extra logits that take softmax weight
    and give no value. `slopes [Hq]` fp32 add slope·(j − p) to the logit (ALiBi, Press et al. 2022); by a `pattern`
    queries see some blocks of keys alone. `k_scale`, `v_scale` `[Hkv]` fp32 multiply an e4m3 cache. Raises
    KernelUnavailable, and on a GPU ValueError for layouts and patterns that its kernels do not read.
    """
    o: Tensor = select("paged_attention", q.device, q.dtype)(
        q,
        k_cache,
        v_cache,
        meta,
        scale=scale,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        slopes=slopes,
        pattern=pattern,
        out=out,
    )
    return o


def attention_kernels(
    device: torch.device,
    *,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    softcap: float = 0.0,
    slopes: bool = False,
    patterns: bool = False,
) -> str:
    """What the implementation "triton" runs on a GPU, for the start-up log: a kernel for each kind of step.

    `group` is query heads per KV head; `slopes` and `patterns`: some layer has these. On
    Hopper what is not used for the model, or not built, stands with the reason.
    """
    from stoker_kernels.attention.choose import describe_kernels

    return describe_kernels(device, kv_dtype, head_dim, group, softcap, slopes=slopes, patterns=patterns)


def split_decodes(meta: AttentionMeta, *, programs: int, programs_per_sm: int, planned: bool = False) -> int:
    """Plan on a GPU how the keys of the decode rows are split among programs, for kernels of other ops.

    The plan lies in the workspace: `items [num_items, 8]` int32 of row, slot, first key, end, the row's first item and
    how many it has, its keys. `programs` work on one item each, `programs_per_sm` fit an SM. → a bound of the items,
    for the launch; with `planned` that alone.
    """
    from stoker_kernels.attention.config import DecodeConfig
    from stoker_kernels.attention.triton_launch import item_bounds, launch_plan

    config = DecodeConfig(programs_per_sm=programs_per_sm)
    if not planned:
        launch_plan(meta, programs, 0, config)
    return item_bounds(meta, programs, config)[1]


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
    """Plan a step of `num_tokens` tokens once for all its layers: the meta to give to each `paged_attention` of it.

    Without it each call plans anew, which costs a launch or two per layer. `window` is the widest of the layers' (0 if
    any layer sees everything), `softcap` that of all; `slopes`: all have slopes,
    `patterns`: some a pattern. `meta.seq_lens` must be final, and the workspace serve no other
    step in between.
    """
    if meta.seq_lens.device.type == "cuda" and invariance_demanded():
        from stoker_kernels.attention import fixed

        return fixed.plan_attention(meta, num_kv_heads=num_kv_heads, window=window)
    if meta.seq_lens.device.type == "cuda":
        from stoker_kernels.attention.choose import plan_attention as plan

        return plan(
            meta,
            num_tokens=num_tokens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            window=window,
            softcap=softcap,
            slopes=slopes,
            patterns=patterns,
        )
    return replace(meta, planned_window=None)
