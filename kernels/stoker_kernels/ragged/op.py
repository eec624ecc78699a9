"""Expand one packed description of a ragged step into per-token inputs, on the device.

Rows `[0, num_decodes)` run one token each, which the device already holds; the rest are prefill chunks whose ids
come from the host. The host uploads a few integers a row plus the chunks' ids; positions, slot mapping and
KV lengths are derived here from the slot state, so nothing of that size crosses the bus.

Invariants: padded rows have `row_slots` −1 (a padded decode row still has its one token, a padded chunk none);
padded tokens, those of padded rows and from `query_start[S]` on, get slot mapping −1, so nothing is written for them.
Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

register("prepare_ragged", "triton", "stoker_kernels.ragged.triton_ragged:prepare_ragged", triton_supports(torch.int32))
register("prepare_ragged", "reference", "stoker_kernels.ragged.op:prepare_ragged_reference", reference_supports)


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


def prepare_ragged(rows: RaggedRows, state: SlotTensors, page_size: int, num_decodes: int, out: RaggedOutputs) -> None:
    """Fill `out` from `rows` and `state`, and set each chunk's slot position to its start. One launch.

    `commit_tokens` with `out.advance` then moves the positions past the step.

    Raises:
        KernelUnavailable: no implementation for the device.
    """
    select("prepare_ragged", rows.ids.device, torch.int32)(rows, state, page_size, num_decodes, out)


def prepare_ragged_reference(
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
