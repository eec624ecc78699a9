"""The slot-state ops and page copies in plain PyTorch: the oracle of the tests and the CPU backend.

Invariants: the signatures and effects are those of `op.py`; padding rows change no state.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_decode(
    row_slots: Tensor,
    last_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    ids_out: Tensor,
    positions_out: Tensor,
    slot_mapping_out: Tensor,
    seq_lens_out: Tensor,
) -> None:
    """Gather ids, positions, slot mapping and lengths by slot; padding rows get 0, 0, −1, 0."""
    real = row_slots >= 0
    slots = row_slots.clamp_min(0).long()
    index = torch.where(real, position[slots], 0).long()
    pages = page_table[slots, index // page_size].long()
    ids_out.copy_(torch.where(real, last_token[slots], 0))
    positions_out.copy_(index)
    slot_mapping_out.copy_(torch.where(real, pages * page_size + index % page_size, -1))
    seq_lens_out.copy_(torch.where(real, index + 1, 0))


def commit_tokens(
    row_slots: Tensor, sampled: Tensor, position: Tensor, last_token: Tensor, ring: Tensor, advance: Tensor
) -> None:
    """Scatter tokens and positions by slot, tokens also into the ring; padding rows write −1 there."""
    real = row_slots >= 0
    slots = row_slots[real].long()
    last_token[slots] = sampled[real]
    position[slots] += advance[real]
    ring.copy_(torch.where(real, sampled, -1))


def apply_updates(packed: Tensor, page_table: Tensor, position: Tensor, last_token: Tensor) -> None:
    """Write (slot, index, value) rows: page table for index ≥ 0, position for −1, last token for −2."""
    slot, index, value = packed[packed[:, 0] >= 0].long().unbind(1)
    value = value.to(page_table.dtype)
    for mine, target in ((index == -1, position), (index == -2, last_token)):
        target[slot[mine]] = value[mine]
    page = index >= 0
    page_table[slot[page], index[page]] = value[page]
