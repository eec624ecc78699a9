"""The plan of a step's adapters in Triton: which slot each token has, and the tokens by slot.

Invariants: a program writes what no other writes, so their order does not matter; each counts all tokens by itself,
which for a step's few thousand is cheaper than waiting for another launch.
Knows nothing of matrices.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import I32, I32_ANYWHERE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.lora.types import TILE, LoraPlan

_TOKENS = 256


@kernel(do_not_specialize=["num_rows", "num_tokens"])
def gather_adapters_kernel(
    row_slots, query_start, slot_adapters, rows, tokens, num_rows, num_tokens,
    BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(row_slots + row, mask=inside, other=-1)
    begin = tl.load(query_start + row)
    # The extra row of programs is that of the padded tail, which has no adapter.
    end = tl.where(inside, tl.load(query_start + row + 1, mask=inside, other=0), num_tokens)
    adapter = tl.load(slot_adapters + slot, mask=slot >= 0, other=-1)
    if tl.program_id(1) == 0:
        tl.store(rows + row, adapter, mask=inside)
    at = begin + offset
    tl.store(tokens + at, tl.zeros([BLOCK], tl.int32) + adapter, mask=at < end)


@kernel(do_not_specialize=["num_tokens", "num_tiles", "slots"])
def group_tokens_kernel(
    adapters, order, tile_adapters, turn, num_tokens, num_tiles, slots,
    SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # A program a slot, and one more for the tiles behind the last one.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    mine = tl.program_id(0)
    if mine == 0:
        tl.store(turn, tl.load(turn) + 1)
    every = tl.arange(0, SLOTS)
    counts = tl.zeros([SLOTS], tl.int32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(adapters + at, mask=at < num_tokens, other=-1)
        counts += tl.sum((slot[:, None] == every[None, :]).to(tl.int32), 0)
    tiles = (counts + TILE - 1) // TILE
    before = tl.sum(tl.where(every < mine, tiles, 0), 0)
    own = tl.where(mine < slots, tl.sum(tl.where(every == mine, tiles, 0), 0), num_tiles - before)
    count = tl.sum(tl.where(every == mine, counts, 0), 0)
    for first in range(0, own, BLOCK):
        at = first + tl.arange(0, BLOCK)
        label = tl.where(mine < slots, mine, -1)
        tl.store(tile_adapters + before + at, tl.zeros([BLOCK], tl.int32) + label, mask=at < own)
    # Places of this program that no token takes.
    for first in range(count, own * TILE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(order + before * TILE + at, tl.zeros([BLOCK], tl.int32) - 1, mask=at < own * TILE)
    place = before * TILE
    if mine < slots:
        for first in range(0, num_tokens, BLOCK):
            at = first + tl.arange(0, BLOCK)
            found = (tl.load(adapters + at, mask=at < num_tokens, other=-1) == mine).to(tl.int32)
            rank = tl.cumsum(found, 0) - 1
            tl.store(order + place + rank, at, mask=found != 0)
            place += tl.sum(found, 0)


def gather_adapters(
    row_slots: Tensor, query_start: Tensor, slot_adapters: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    """A program for each row and block of tokens, and one more row of programs for the padded tail."""
    count = row_slots.shape[0]
    gather_adapters_kernel[(count + 1, triton.cdiv(tokens.shape[0], _TOKENS))](
        row_slots, query_start, slot_adapters, rows, tokens, count, tokens.shape[0],
        BLOCK=_TOKENS, **launch_options(row_slots.device),
    )  # fmt: skip


def group_tokens(adapters: Tensor, slots: int, plan: LoraPlan) -> None:
    """A program for each slot, and one for the tiles that stay empty."""
    group_tokens_kernel[(slots + 1,)](
        adapters, plan.order, plan.adapters, plan.turn, adapters.shape[0], plan.adapters.shape[0], slots,
        SLOTS=padded_slots(slots), TILE=TILE, BLOCK=_TOKENS, **launch_options(adapters.device),
    )  # fmt: skip


def padded_slots(slots: int) -> int:
    """The power of two in which the kernel counts by slot."""
    return max(8, 1 << (slots - 1).bit_length())


register_aot(
    gather_adapters_kernel,
    dict.fromkeys(("row_slots", "query_start"), I32_ANYWHERE)
    | dict.fromkeys(("slot_adapters", "rows", "tokens"), f"*{I32}")
    | dict.fromkeys(("num_rows", "num_tokens"), I32),
    [{"BLOCK": _TOKENS}],
)
register_aot(
    group_tokens_kernel,
    dict.fromkeys(("adapters", "order", "tile_adapters", "turn"), f"*{I32}")
    | dict.fromkeys(("num_tokens", "num_tiles", "slots"), I32),
    [
        {"SLOTS": slots, "TILE": TILE, "BLOCK": _TOKENS}
        for slots in (8, 16, 32, 64)
    ],
)
