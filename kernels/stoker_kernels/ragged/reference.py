"""A ragged step's inputs in plain PyTorch, row by row: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch

from stoker_kernels.ragged.types import RaggedOutputs, RaggedRows, SlotTensors


def prepare_ragged(
    rows: RaggedRows, state: SlotTensors, page_size: int, num_decodes: int, out: RaggedOutputs
) -> None:
    """The definition of `prepare_ragged`, row by row."""
    slots, query_start, starts = rows.row_slots.tolist(), rows.query_start.tolist(), rows.starts.tolist()
    out.ids.zero_()
    out.positions.zero_()
    out.slot_mapping.fill_(-1)
    for row, slot in enumerate(slots):
        begin, end = query_start[row], query_start[row + 1]
        out.advance[row] = end - begin
        out.logits_rows[row] = max(end - 1, 0)
        if slot < 0 or begin == end:
            out.seq_lens[row] = 0
            continue
        first = int(state.position[slot]) if row < num_decodes else starts[row]
        positions = torch.arange(first, first + end - begin, device=rows.ids.device)
        out.ids[begin:end] = state.last_token[slot] if row < num_decodes else rows.ids[begin:end]
        out.positions[begin:end] = positions.to(torch.int32)
        pages = state.page_table[slot, positions // page_size].long()
        out.slot_mapping[begin:end] = pages * page_size + positions % page_size
        out.seq_lens[row] = first + end - begin
        state.position[slot] = first
