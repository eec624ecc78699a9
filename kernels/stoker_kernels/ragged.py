"""Expand one packed description of a ragged step into per-token inputs, on the device.

Rows `[0, num_decodes)` run one token each, which the device already holds; the rest are prefill chunks whose ids
come from the host. The host uploads a few integers a row plus the chunks' ids; positions, slot mapping and
KV lengths are derived here from the slot state, so nothing of that size crosses the bus.

Invariants: padded rows have `row_slots` −1 and an empty query range; padded tokens (from `query_start[S]` on) get
slot mapping −1, so nothing is written for them. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stoker_kernels import dispatch

TOKENS_PER_PROGRAM = 256


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
    """The slot state a step reads: last_token [slots] int32, position [slots] int32, page_table [slots, max_pages] int32."""

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
    dispatch.select("prepare_ragged", rows.ids.device, torch.int32)(rows, state, page_size, num_decodes, out)


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


@triton.jit
def prepare_ragged_kernel(
    row_slots, query_start, starts, host_ids,
    last_token, position, page_table,
    ids, positions, slot_mapping, seq_lens, logits_rows, advance,
    num_rows, num_tokens, num_decodes, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.program_id(1)
    if row == num_rows:
        tokens = tl.load(query_start + num_rows) + block * BLOCK + tl.arange(0, BLOCK)
        padded = tokens < num_tokens
        zero = tl.zeros([BLOCK], tl.int32)
        tl.store(ids + tokens, zero, mask=padded)
        tl.store(positions + tokens, zero, mask=padded)
        tl.store(slot_mapping + tokens, zero.to(tl.int64) - 1, mask=padded)
    else:
        slot = tl.load(row_slots + row)
        begin = tl.load(query_start + row)
        end = tl.load(query_start + row + 1)
        real = (slot >= 0) & (end > begin)
        safe = tl.where(slot >= 0, slot, 0)
        first = tl.where(row < num_decodes, tl.load(position + safe), tl.load(starts + row))
        if block == 0:
            tl.store(seq_lens + row, tl.where(real, first + end - begin, 0))
            tl.store(logits_rows + row, tl.maximum(end - 1, 0).to(tl.int64))
            tl.store(advance + row, end - begin)
            tl.store(position + safe, first, mask=real)
        offset = block * BLOCK + tl.arange(0, BLOCK)
        tokens = begin + offset
        mask = (tokens < end) & real
        where = first + offset
        given = tl.load(host_ids + tokens, mask=mask, other=0)
        held = tl.load(last_token + safe)
        tl.store(ids + tokens, tl.where(row < num_decodes, held, given), mask=mask)
        tl.store(positions + tokens, where, mask=mask)
        page = tl.load(page_table + safe.to(tl.int64) * table_stride + where // PAGE, mask=mask, other=0)
        tl.store(slot_mapping + tokens, page.to(tl.int64) * PAGE + where % PAGE, mask=mask)


def prepare_ragged_triton(
    rows: RaggedRows, state: SlotTensors, page_size: int, num_decodes: int, out: RaggedOutputs
) -> None:
    """One program per row and block of tokens, and one more row of programs for the padded tail."""
    num_rows, num_tokens = rows.row_slots.shape[0], rows.ids.shape[0]
    grid = (num_rows + 1, triton.cdiv(num_tokens, TOKENS_PER_PROGRAM))
    prepare_ragged_kernel[grid](
        rows.row_slots, rows.query_start, rows.starts, rows.ids,
        state.last_token, state.position, state.page_table,
        out.ids, out.positions, out.slot_mapping, out.seq_lens, out.logits_rows, out.advance,
        num_rows, num_tokens, num_decodes, state.page_table.stride(0),
        PAGE=page_size, BLOCK=TOKENS_PER_PROGRAM,
    )  # fmt: skip
