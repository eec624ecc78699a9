"""What a step tells attention: which query token sees which pages, and the scratch it may use.

Invariants: nothing here is read on the host but the plain integers, which are bounds; the tensors may change between
replays of a captured graph. Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Items beyond one per row that a decode plan may use: those of one KV head on 192 SMs, 4 programs each, slack 2.
EXTRA_ITEMS = 1536
MAX_SHARES = EXTRA_ITEMS // 2  # CTAs of a plan by shares: each may leave two partial results
MAX_TILES = 4096  # of prefill tokens in a mixed step


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Scratch of the op, allocated once and shared by all layers of a step.

    `partial [items, Hq, D]` fp32 and `partial_lse [items, Hq]` fp32 hold the KV splits of one decode call;
    `items [items, 8]` int32 is the decode plan, `num_items [1]` int32 its length, or `shares [768, 8]` int32 is, by
    CTA; `tiles [4096, 8]` int32 is the plan of the chunks, `num_tiles [1]` its length. `tickets [3]` int32 hand out
    tiles and shares, `arrivals [max_rows, Hq]` int32 count the splits that are done; both are zero between calls.
    """

    partial: Tensor
    partial_lse: Tensor
    items: Tensor
    num_items: Tensor
    shares: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tickets: Tensor
    arrivals: Tensor


@dataclass(frozen=True, slots=True)
class ResultsBefore:
    """What the decode rows attended of keys before those of the page table, in parts, to be merged with their own.

    `values [parts, rows, Hq, D]` fp32 are normalised, and not multiplied by `v_scale`; `lse [parts, rows, Hq]` fp32 is
    log2 of the sum of 2^logit, logits in units of log2(e). A row without keys has −∞ and zeros.
    """

    values: Tensor
    lse: Tensor

    @property
    def parts(self) -> int:
        """How many results of a row there are."""
        return int(self.values.shape[0])


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys that all rows of a step begin with, and that its page table does not name.

    `keys [1]` int32 counts them, whole pages: the first of the line `seq_slots[0]` of `page_table [slots, pages]`.
    `results` is room for what attends them.
    """

    keys: Tensor
    page_table: Tensor
    seq_slots: Tensor
    results: ResultsBefore


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Which query token sees which pages. Rows are ordered decodes first, then prefill chunks.

    `page_table [slots, max_pages]` int32; `seq_slots [S]` int32 gives a row's line in it; `query_start [S+1]` int32
    are token offsets; `seq_lens [S]` int32 count the keys including this step's tokens (0 = padded row).
    `max_query_len` and `max_seq_len` are host bounds, at least as large as any real value.
    `planned_window` is set by `plan_attention`: the workspace already holds the decode plan of this step, by shares
    (`share_plan.py`) where `planned_shares`, by items where `planned_items`, for layers that the kernels of shares do
    not take, and where `planned_tiles` that of its chunks (`tile_plan.py`).
    `settled`: these tensors and the plan are complete before any kernel of
    attention can start (`pdl.pdl_settle`), so that one may read them, and keys of earlier steps, ahead of its turn.
    `fresh`: how many of a decode row's last keys this step may write; with drafts a sequence has several rows.
    `shared`: all this is of keys behind those, which the step's rows have in common (`shared_prefix`).
    """

    page_table: Tensor
    seq_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    workspace: AttentionWorkspace
    planned_window: int | None = None
    planned_shares: bool = False
    planned_items: bool = False
    planned_tiles: bool = False
    settled: bool = False
    fresh: int = 1
    shared: SharedPrefix | None = None


def attention_workspace(
    max_rows: int, num_q_heads: int, head_dim: int, device: torch.device | str
) -> AttentionWorkspace:
    """Allocate the scratch for steps of up to `max_rows` decode rows: about (max_rows + 1536) · Hq · (4D + 4) bytes."""
    items = max_rows + EXTRA_ITEMS
    return AttentionWorkspace(
        partial=torch.empty(items, num_q_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(items, num_q_heads, dtype=torch.float32, device=device),
        items=torch.zeros(items, 8, dtype=torch.int32, device=device),
        num_items=torch.zeros(1, dtype=torch.int32, device=device),
        shares=torch.zeros(MAX_SHARES, 8, dtype=torch.int32, device=device),
        tiles=torch.zeros(MAX_TILES, 8, dtype=torch.int32, device=device),
        num_tiles=torch.zeros(1, dtype=torch.int32, device=device),
        tickets=torch.zeros(3, dtype=torch.int32, device=device),
        arrivals=torch.zeros(max_rows, num_q_heads, dtype=torch.int32, device=device),
    )


def share_workspace(workspace: AttentionWorkspace) -> AttentionWorkspace:
    """Scratch of the same size for a second plan of the same steps: only what a plan lies in is its own."""
    plan = ("items", "num_items", "shares", "tiles", "num_tiles")
    return replace(workspace, **{name: torch.zeros_like(getattr(workspace, name)) for name in plan})


def plan_bytes(max_rows: int) -> int:
    """Bytes that `share_workspace` allocates beside a workspace for so many rows."""
    return 4 * ((max_rows + EXTRA_ITEMS + MAX_SHARES + MAX_TILES) * 8 + 2)


def attention_workspace_bytes(max_rows: int, num_q_heads: int, head_dim: int) -> int:
    """Bytes that `attention_workspace` allocates."""
    items = max_rows + EXTRA_ITEMS
    plans = (items + MAX_SHARES + MAX_TILES) * 8
    return 4 * (items * num_q_heads * (head_dim + 1) + plans + 5 + max_rows * num_q_heads)
