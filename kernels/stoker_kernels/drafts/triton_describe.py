"""The description of one pass of a draft model, in Triton: a thread a row.

Invariants: every access is masked by the row count, by the sign of the slot and by the row's cap.
Knows nothing of models, and of what comes of the pass.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.drafts.types import VerifyOutputs
from stoker_kernels.launch.aot_registry import I32, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

_ROWS = 128


@kernel(do_not_specialize=["at"])
def _describe_draft_kernel(
    row_slots,
    caps,
    drafts,
    position,
    history,
    page_table,
    slots_out,
    ids_out,
    positions_out,
    seq_lens_out,
    slot_mapping_out,
    rows,
    at,
    history_stride,
    history_length,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    back = tl.program_id(1)  # of pass 0 alone: 1 for the tokens before the last ones
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    cap = tl.load(caps + row, mask=inside, other=0)
    real = (slot >= 0) & (cap > at)
    index = tl.load(position + slot, mask=real, other=0) + at - back
    real = real & (index >= 0) & (index < history_length)
    held = tl.load(history + slot.to(tl.int64) * history_stride + index, mask=real & (at == 0), other=0)
    guess = tl.load(drafts + (at - 1) * rows + row, mask=real & (at > 0), other=0)
    token = tl.where(at == 0, held, guess)
    index = tl.where(real, index, 0)
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + index // PAGE_SIZE, mask=real, other=0)
    place = page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE
    where = back * rows + row
    tl.store(slots_out + where, tl.where(real, slot, -1), mask=inside)
    tl.store(ids_out + where, tl.where(real, token, 0), mask=inside)
    tl.store(positions_out + where, index, mask=inside)
    tl.store(seq_lens_out + where, tl.where(real, index + 1, 0), mask=inside)
    tl.store(slot_mapping_out + where, tl.where(real, place, -1), mask=inside)


def describe_draft(
    row_slots: Tensor,
    caps: Tensor,
    drafts: Tensor,
    at: int,
    position: Tensor,
    history: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    out: VerifyOutputs,
) -> None:
    """`drafts.describe_draft` on CUDA."""
    rows = row_slots.shape[0]
    _describe_draft_kernel[(triton.cdiv(rows, _ROWS), 1 if at else 2)](
        row_slots,
        caps,
        drafts,
        position,
        history,
        page_table,
        out.slots,
        out.ids,
        out.positions,
        out.seq_lens,
        out.slot_mapping,
        rows,
        at,
        history.stride(0),
        history.shape[1],
        page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        **launch_options(row_slots.device),
    )


register_aot(
    _describe_draft_kernel,
    dict.fromkeys(("row_slots", "caps", "drafts", "position", "history", "page_table"), f"*{I32}")
    | dict.fromkeys(("slots_out", "ids_out", "positions_out", "seq_lens_out"), f"*{I32}")
    | {"slot_mapping_out": f"*{I64}"}
    | dict.fromkeys(("rows", "at", "history_stride", "history_length", "table_stride"), I32),
    [{"PAGE_SIZE": size, "ROWS": _ROWS} for size in (16, 32, 64, 128)],
)
