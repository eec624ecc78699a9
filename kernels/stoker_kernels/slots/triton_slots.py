"""The slot-state ops in Triton: one launch each, a thread a row.

Invariants: every access is masked by the row count and by the sign of the slot; nothing is read back to the
host.
Knows nothing of how the rows were chosen.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import I32, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

_ROWS = 128


@kernel
def _prepare_decode_kernel(
    row_slots,
    last_token,
    position,
    page_table,
    ids_out,
    positions_out,
    slot_mapping_out,
    seq_lens_out,
    rows,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    real = slot >= 0
    index = tl.load(position + slot, mask=real, other=0)
    token = tl.load(last_token + slot, mask=real, other=0)
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + index // PAGE_SIZE, mask=real, other=0)
    place = page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE
    tl.store(ids_out + row, token, mask=inside)
    tl.store(positions_out + row, index, mask=inside)
    tl.store(slot_mapping_out + row, tl.where(real, place, -1), mask=inside)
    tl.store(seq_lens_out + row, tl.where(real, index + 1, 0), mask=inside)


@kernel
def _commit_tokens_kernel(
    row_slots,
    sampled,
    position,
    last_token,
    ring,
    advance,
    rows,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    real = slot >= 0
    token = tl.load(sampled + row, mask=real, other=-1)
    index = tl.load(position + slot, mask=real, other=0) + tl.load(advance + row, mask=real, other=0)
    tl.store(last_token + slot, token, mask=real)
    tl.store(position + slot, index, mask=real)
    tl.store(ring + row, token, mask=inside)


@kernel
def _apply_updates_kernel(
    packed,
    page_table,
    position,
    last_token,
    rows,
    table_stride,
    ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(packed + 3 * row, mask=inside, other=-1)
    index = tl.load(packed + 3 * row + 1, mask=inside, other=0)
    value = tl.load(packed + 3 * row + 2, mask=inside, other=0)
    real = slot >= 0
    tl.store(page_table + slot.to(tl.int64) * table_stride + index, value, mask=real & (index >= 0))
    tl.store(position + slot, value, mask=real & (index == -1))
    tl.store(last_token + slot, value, mask=real & (index == -2))


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
    """`slots.prepare_decode` on CUDA."""
    rows = row_slots.shape[0]
    _prepare_decode_kernel[(triton.cdiv(rows, _ROWS),)](
        row_slots,
        last_token,
        position,
        page_table,
        ids_out,
        positions_out,
        slot_mapping_out,
        seq_lens_out,
        rows,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        **launch_options(row_slots.device),
    )


def commit_tokens(
    row_slots: Tensor, sampled: Tensor, position: Tensor, last_token: Tensor, ring: Tensor, advance: Tensor
) -> None:
    """`slots.commit_tokens` on CUDA."""
    rows = row_slots.shape[0]
    _commit_tokens_kernel[(triton.cdiv(rows, _ROWS),)](
        row_slots,
        sampled,
        position,
        last_token,
        ring,
        advance,
        rows,
        ROWS=_ROWS,
        **launch_options(row_slots.device),
    )


def apply_updates(packed: Tensor, page_table: Tensor, position: Tensor, last_token: Tensor) -> None:
    """`slots.apply_updates` on CUDA. `packed` is contiguous; an empty one launches nothing."""
    rows = packed.shape[0]
    if rows == 0:
        return
    _apply_updates_kernel[(triton.cdiv(rows, _ROWS),)](
        packed,
        page_table,
        position,
        last_token,
        rows,
        page_table.stride(0),
        ROWS=_ROWS,
        **launch_options(packed.device),
    )


register_aot(
    _prepare_decode_kernel,
    dict.fromkeys(("row_slots", "last_token", "position", "page_table"), f"*{I32}")
    | dict.fromkeys(("ids_out", "positions_out", "seq_lens_out"), f"*{I32}")
    | {"slot_mapping_out": f"*{I64}", "rows": I32, "table_stride": I32},
    [{"PAGE_SIZE": size, "ROWS": _ROWS} for size in (16, 32, 64, 128)],
)
register_aot(
    _commit_tokens_kernel,
    dict.fromkeys(("row_slots", "sampled", "position", "last_token", "ring", "advance"), f"*{I32}") | {"rows": I32},
    [{"ROWS": _ROWS}],
)
register_aot(
    _apply_updates_kernel,
    dict.fromkeys(("packed", "page_table", "position", "last_token"), f"*{I32}") | {"rows": I32, "table_stride": I32},
    [{"ROWS": _ROWS}],
)
