"""Paged attention, one op for decode, prefill and mixed steps: `paged_attention(q, k_cache, v_cache, meta, ...)`.

Invariants: the step's own keys and values are in the cache before the op runs. Rows `[0, num_decodes)` have one query
token each and sit at tokens `[0, num_decodes)`; a row with `seq_lens` 0 is padding, its output is zero and it reads
no page. Tokens past `query_start[-1]` are padding too. Nothing is read back to the host, so a captured graph stays
valid for any lengths within the bounds `max_query_len` and `max_seq_len`.
Knows nothing of the page allocator, of positions (they follow from `seq_lens`) or of rotary embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.reference_attention import reference_attention


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Scratch of the op, allocated once and shared by all layers of a step.

    `partial [items, Hq, D]` fp32 and `partial_lse [items, Hq]` fp32 hold the KV splits of one decode call;
    `items [items, 8]` int32 is the decode plan, `num_items [1]` int32 its length; `arrivals [max_rows, Hq]` int32
    counts the splits that are done and is zero between calls.
    """

    partial: Tensor
    partial_lse: Tensor
    items: Tensor
    num_items: Tensor
    arrivals: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Which query token sees which pages. Rows are ordered decodes first, then prefill chunks.

    `page_table [slots, max_pages]` int32; `seq_slots [S]` int32 gives a row's line in it; `query_start [S+1]` int32
    are token offsets; `seq_lens [S]` int32 count the keys including this step's tokens (0 = padded row).
    `max_query_len` and `max_seq_len` are host bounds, at least as large as any real value.
    """

    page_table: Tensor
    seq_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    workspace: AttentionWorkspace


# Items beyond one per row that the decode plan may use: 132 SMs × 4 resident programs, and room for larger GPUs.
EXTRA_ITEMS = 768


def attention_workspace(
    max_rows: int, num_q_heads: int, head_dim: int, device: torch.device | str
) -> AttentionWorkspace:
    """Allocate the scratch for steps of up to `max_rows` rows. On the CPU it is empty: the reference needs none."""
    device = torch.device(device)
    items = 0 if device.type == "cpu" else 2 * max_rows + EXTRA_ITEMS
    rows = 0 if device.type == "cpu" else max_rows
    return AttentionWorkspace(
        partial=torch.empty(items, num_q_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(items, num_q_heads, dtype=torch.float32, device=device),
        items=torch.zeros(items, 8, dtype=torch.int32, device=device),
        num_items=torch.zeros(1, dtype=torch.int32, device=device),
        arrivals=torch.zeros(rows, num_q_heads, dtype=torch.int32, device=device),
    )


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
    """Causal attention of `q [T, Hq, D]` over the pages `[P, Hkv, B, D]` named by `meta`; returns `[T, Hq, D]`.

    The logit of query position p and key j ≤ p is `q·k·scale`, then `softcap·tanh(logit/softcap)` if softcap > 0;
    with `window` > 0 only keys with p − j < window count. `sinks [Hq]` fp32 are extra logits that take softmax weight
    and give no value. `k_scale`, `v_scale` `[Hkv]` fp32 multiply an e4m3 cache.
    """
    return reference_attention(
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
        out=out,
    )
