"""The executor's state on the device, by slot: last token, position and page table row of each sequence.

Invariants: every function has fixed shapes and reads its row → slot map on the device, so that a captured
graph stays right when the membership of a batch changes; a row whose slot is negative is padding and
changes no state. `position[slot]` is the index of the token to be run next, which is `last_token[slot]`.
Knows nothing of sampling parameters (`sampling/`) or of who decides which sequence has which slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

POSITION_INDEX = -1
LAST_TOKEN_INDEX = -2

for _op in ("prepare_decode", "commit_tokens", "apply_updates"):
    register(_op, "triton", f"stoker_kernels.slots.triton_slots:{_op}", triton_supports(torch.int32), invariant=True)
    register(_op, "reference", f"stoker_kernels.slots.reference:{_op}", reference_supports, invariant=True)


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
    """Gather the inputs of a decode step by slot.

    `row_slots [R]`, `last_token [S]`, `position [S]`, `page_table [S,max_pages]`, all int32; outputs `[R]`:
    int32, and int64 for the slot mapping. Row r with slot s = row_slots[r] ≥ 0: id last_token[s], position
    position[s], slot mapping page_table[s, position // page_size] * page_size + position % page_size,
    length position + 1. A padding row: id 0, position 0, slot mapping −1, length 0.
    """
    select("prepare_decode", row_slots.device, row_slots.dtype)(
        row_slots,
        last_token,
        position,
        page_table,
        page_size,
        ids_out=ids_out,
        positions_out=positions_out,
        slot_mapping_out=slot_mapping_out,
        seq_lens_out=seq_lens_out,
    )


def commit_tokens(
    row_slots: Tensor, sampled: Tensor, position: Tensor, last_token: Tensor, ring: Tensor, advance: Tensor
) -> None:
    """Scatter a step's tokens back to their slots, and into the row of the ring that the host reads.

    `row_slots`, `sampled`, `ring`, `advance` are `[R]` int32: last_token[slot] = sampled, position[slot] +=
    advance, ring = sampled. A padding row writes ring = −1 and no state. A slot may occur in one row only.
    """
    select("commit_tokens", row_slots.device, row_slots.dtype)(row_slots, sampled, position, last_token, ring, advance)


def apply_updates(packed: Tensor, page_table: Tensor, position: Tensor, last_token: Tensor) -> None:
    """Apply one upload of changes, made by `pack_updates`, to the slot state.

    `packed [n,3]` int32: (slot, index, value). Index ≥ 0 sets page_table[slot, index], −1 position[slot],
    −2 last_token[slot]. A negative slot is padding. No two rows may name the same place.
    """
    select("apply_updates", packed.device, packed.dtype)(packed, page_table, position, last_token)


def pack_updates(
    pages: Iterable[tuple[int, int, Sequence[int]]] = (),
    positions: Iterable[tuple[int, int]] = (),
    last_tokens: Iterable[tuple[int, int]] = (),
) -> npt.NDArray[np.int32]:
    """Pack changes for `apply_updates` → `[n,3]` int32.

    `pages` are (slot, start, page ids): page_table[slot, start : start + len] = ids; `positions` and
    `last_tokens` are (slot, value). Where a place is named twice the later mention wins.
    """
    blocks: list[npt.NDArray[np.int32]] = []
    for slot, start, ids in pages:
        block = np.empty((len(ids), 3), np.int32)
        block[:, 0] = slot
        block[:, 1] = np.arange(start, start + len(ids))
        block[:, 2] = ids
        blocks.append(block)
    for index, pairs in ((POSITION_INDEX, positions), (LAST_TOKEN_INDEX, last_tokens)):
        rows = [(slot, index, value) for slot, value in pairs]
        if rows:
            blocks.append(np.array(rows, np.int32))
    if not blocks:
        return np.empty((0, 3), np.int32)
    return _last_mention(np.concatenate(blocks))


def _last_mention(packed: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Drop rows that a later row overwrites: the kernel applies all rows at once, in no order."""
    places = packed[:, 0].astype(np.int64) << 32 | packed[:, 1].astype(np.int64) & 0xFFFFFFFF
    _, last = np.unique(places[::-1], return_index=True)
    return packed if len(last) == len(packed) else packed[np.sort(len(packed) - 1 - last)]
