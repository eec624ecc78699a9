"""Triton kernel of `ragged.prepare_ragged`: one program per row and block of tokens.

Invariants: rows are independent, so the order of programs does not matter; the extra row of programs clears the
padded tail. Knows nothing of models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.aot_registry import I32, I32_ANYWHERE, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.ragged.types import RaggedOutputs, RaggedRows, SlotTensors

TOKENS_PER_PROGRAM = 256


@kernel
def prepare_ragged_kernel(
    row_slots, query_start, starts, host_ids,
    last_token, position, page_table,
    ids, positions, slot_mapping, seq_lens, logits_rows, advance,
    num_rows, num_tokens, num_decodes, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
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
        padded = (tokens < end) & (slot < 0)
        tl.store(ids + tokens, tl.zeros([BLOCK], tl.int32), mask=padded)
        tl.store(positions + tokens, tl.zeros([BLOCK], tl.int32), mask=padded)
        tl.store(slot_mapping + tokens, tl.zeros([BLOCK], tl.int64) - 1, mask=padded)
        tl.store(ids + tokens, tl.where(row < num_decodes, held, given), mask=mask)
        tl.store(positions + tokens, where, mask=mask)
        page = tl.load(page_table + safe.to(tl.int64) * table_stride + where // PAGE, mask=mask, other=0)
        tl.store(slot_mapping + tokens, page.to(tl.int64) * PAGE + where % PAGE, mask=mask)


def prepare_ragged(rows: RaggedRows, state: SlotTensors, page_size: int, num_decodes: int, out: RaggedOutputs) -> None:
    """One program per row and block of tokens, and one more row of programs for the padded tail."""
    num_rows, num_tokens = rows.row_slots.shape[0], rows.ids.shape[0]
    grid = (num_rows + 1, triton.cdiv(num_tokens, TOKENS_PER_PROGRAM))
    prepare_ragged_kernel[grid](
        rows.row_slots, rows.query_start, rows.starts, rows.ids,
        state.last_token, state.position, state.page_table,
        out.ids, out.positions, out.slot_mapping, out.seq_lens, out.logits_rows, out.advance,
        num_rows, num_tokens, num_decodes, state.page_table.stride(0),
        PAGE=page_size, BLOCK=TOKENS_PER_PROGRAM, **launch_options(rows.ids.device),
    )  # fmt: skip


register_aot(
    prepare_ragged_kernel,
    dict.fromkeys(("row_slots", "query_start", "starts", "host_ids"), I32_ANYWHERE)
    | dict.fromkeys(("last_token", "position", "page_table"), f"*{I32}")
    | dict.fromkeys(("ids", "positions", "seq_lens", "advance"), f"*{I32}")
    | dict.fromkeys(("slot_mapping", "logits_rows"), f"*{I64}")
    | dict.fromkeys(("num_rows", "num_tokens", "num_decodes", "table_stride"), I32),
    [{"PAGE": page, "BLOCK": TOKENS_PER_PROGRAM} for page in (16, 32, 64, 128)],
)
