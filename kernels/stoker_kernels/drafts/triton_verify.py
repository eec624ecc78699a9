"""The description of a verification and the acceptance of its drafts, in Triton: a thread a row.

Invariants: every access is masked by the row count and by the sign of the slot.
Knows nothing of how drafts were found or tokens sampled.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.drafts.types import VerifyOutputs
from stoker_kernels.launch.aot_registry import I32, I32_ANYWHERE, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

_ROWS = 128


@kernel
def _expand_drafts_kernel(
    row_slots,
    drafts,
    last_token,
    position,
    page_table,
    slots_out,
    ids_out,
    positions_out,
    seq_lens_out,
    slot_mapping_out,
    rows,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1)
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    real = slot >= 0
    held = tl.load(last_token + slot, mask=real & (column == 0), other=0)
    guess = tl.load(drafts + (column - 1) * rows + row, mask=real & (column > 0), other=-1)
    token = tl.where(column == 0, held, guess)
    real = real & ((column == 0) | (guess >= 0))
    index = tl.load(position + slot, mask=real, other=0) + tl.where(real, column, 0)
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + index // PAGE_SIZE, mask=real, other=0)
    place = page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE
    at = column * rows + row
    tl.store(slots_out + at, tl.where(real, slot, -1), mask=inside)
    tl.store(ids_out + at, tl.where(real, token, 0), mask=inside)
    tl.store(positions_out + at, index, mask=inside)
    tl.store(seq_lens_out + at, tl.where(real, index + 1, 0), mask=inside)
    tl.store(slot_mapping_out + at, tl.where(real, place, -1), mask=inside)


@kernel
def _follow_drafts_kernel(slots, sampled, drafts, out, rows, ROWS: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    token = tl.load(sampled + row, mask=inside, other=-1)
    guess = tl.load(drafts + row, mask=inside, other=-1)
    tl.store(out + row, tl.where((slot >= 0) & (token == guess), slot, -1), mask=inside)


@kernel
def _accept_drafts_kernel(
    row_slots,
    sampled,
    drafts,
    position,
    last_token,
    history,
    out,
    rows,
    k,
    stride,
    history_length,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    real = slot >= 0
    width = k + 3
    first = tl.load(position + slot, mask=real, other=0) + 1
    tokens = history + slot.to(tl.int64) * stride
    alive = real
    count = tl.zeros([ROWS], tl.int32)
    offered = tl.zeros([ROWS], tl.int32)
    last = tl.zeros([ROWS], tl.int32)
    for column in range(k + 1):
        token = tl.load(sampled + column * rows + row, mask=inside, other=-1)
        tl.store(tokens + first + column, token, mask=alive & (first + column < history_length))
        tl.store(out + row * width + 2 + column, tl.where(alive, token, -1), mask=inside)
        last = tl.where(alive, token, last)
        count += alive.to(tl.int32)
        guess = tl.load(drafts + column * rows + row, mask=real & (column < k), other=-1)
        offered += (guess >= 0).to(tl.int32)
        alive = alive & (guess >= 0) & (guess == token)
    tl.store(out + row * width, count, mask=inside)
    tl.store(out + row * width + 1, offered, mask=inside)
    tl.store(position + slot, first - 1 + count, mask=real)
    tl.store(last_token + slot, last, mask=real)


@kernel
def _record_tokens_kernel(
    row_slots, position, last_token, history, rows, stride, history_length,
    ROWS: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(row_slots + row, mask=row < rows, other=-1)
    real = slot >= 0
    index = tl.load(position + slot, mask=real, other=0)
    token = tl.load(last_token + slot, mask=real, other=0)
    tl.store(history + slot.to(tl.int64) * stride + index, token, mask=real & (index < history_length))


def expand_drafts(
    row_slots: Tensor,
    drafts: Tensor,
    last_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    out: VerifyOutputs,
) -> None:
    """`drafts.expand_drafts` on CUDA."""
    k, rows = drafts.shape
    _expand_drafts_kernel[(triton.cdiv(rows, _ROWS), k + 1)](
        row_slots,
        drafts,
        last_token,
        position,
        page_table,
        out.slots,
        out.ids,
        out.positions,
        out.seq_lens,
        out.slot_mapping,
        rows,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        **launch_options(row_slots.device),
    )


def follow_drafts(slots: Tensor, sampled: Tensor, drafts: Tensor, *, out: Tensor) -> None:
    """`drafts.follow_drafts` on CUDA."""
    rows = slots.shape[0]
    _follow_drafts_kernel[(triton.cdiv(rows, _ROWS),)](
        slots, sampled, drafts, out, rows, ROWS=_ROWS, **launch_options(slots.device)
    )


def accept_drafts(
    row_slots: Tensor,
    sampled: Tensor,
    drafts: Tensor,
    position: Tensor,
    last_token: Tensor,
    history: Tensor,
    *,
    out: Tensor,
) -> None:
    """`drafts.accept_drafts` on CUDA."""
    k, rows = drafts.shape
    _accept_drafts_kernel[(triton.cdiv(rows, _ROWS),)](
        row_slots,
        sampled,
        drafts,
        position,
        last_token,
        history,
        out,
        rows,
        k,
        history.stride(0),
        history.shape[1],
        ROWS=_ROWS,
        **launch_options(row_slots.device),
    )


def record_tokens(row_slots: Tensor, position: Tensor, last_token: Tensor, history: Tensor) -> None:
    """`drafts.record_tokens` on CUDA."""
    rows = row_slots.shape[0]
    _record_tokens_kernel[(triton.cdiv(rows, _ROWS),)](
        row_slots, position, last_token, history, rows, history.stride(0), history.shape[1],
        ROWS=_ROWS, **launch_options(row_slots.device),
    )  # fmt: skip


register_aot(
    _expand_drafts_kernel,
    dict.fromkeys(("row_slots", "drafts", "last_token", "position", "page_table"), f"*{I32}")
    | dict.fromkeys(("slots_out", "ids_out", "positions_out", "seq_lens_out"), f"*{I32}")
    | {"slot_mapping_out": f"*{I64}", "rows": I32, "table_stride": I32},
    [{"PAGE_SIZE": size, "ROWS": _ROWS} for size in (16, 32, 64, 128)],
)
register_aot(
    _follow_drafts_kernel,
    dict.fromkeys(("slots", "sampled", "drafts", "out"), I32_ANYWHERE) | {"rows": I32},
    [{"ROWS": _ROWS}],
)
register_aot(
    _accept_drafts_kernel,
    dict.fromkeys(("row_slots", "sampled", "drafts", "position", "last_token", "history", "out"), f"*{I32}")
    | dict.fromkeys(("rows", "k", "stride", "history_length"), I32),
    [{"ROWS": _ROWS}],
)
register_aot(
    _record_tokens_kernel,
    # Of a step with chunks the slots are a part of its upload.
    {"row_slots": I32_ANYWHERE}
    | dict.fromkeys(("position", "last_token", "history"), f"*{I32}")
    | dict.fromkeys(("rows", "stride", "history_length"), I32),
    [{"ROWS": _ROWS}],
)
