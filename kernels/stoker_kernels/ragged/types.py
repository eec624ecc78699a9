"""What a ragged step is described by, and what is made of it.

Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The packed upload. `S` rows, `T` tokens (both padded).

    row_slots [S] int32, −1 for padding; query_start [S+1] int32; starts [S] int32, first position of a chunk
    (ignored for decodes); ids [T] int32 (ignored for decodes).
    """

    row_slots: torch.Tensor
    query_start: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """The slot state, all int32: last_token [slots], position [slots], page_table [slots, max_pages]."""

    last_token: torch.Tensor
    position: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class RaggedOutputs:
    """What a step's forward needs: ids [T] int32, positions [T] int32, slot_mapping [T] int64, seq_lens [S] int32,
    logits_rows [S] int64 (each row's last token), advance [S] int32 (its number of tokens)."""

    ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    advance: torch.Tensor
