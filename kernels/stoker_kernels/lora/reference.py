"""Adapters in plain PyTorch, group by group: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker_kernels.lora.types import TILE, LoraPlan, LoraTarget
from stoker_kernels.quant import Quantized


def gather_adapters(
    row_slots: Tensor, query_start: Tensor, slot_adapters: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    """The definition of `gather_adapters`."""
    rows.copy_(torch.where(row_slots >= 0, slot_adapters[row_slots.clamp(min=0).long()], -1))
    tokens.fill_(-1)
    starts = query_start.tolist()
    for row, adapter in enumerate(rows.tolist()):
        tokens[starts[row] : starts[row + 1]] = adapter


def group_tokens(adapters: Tensor, slots: int, plan: LoraPlan) -> None:
    """The definition of `group_tokens`."""
    plan.order.fill_(-1)
    plan.adapters.fill_(-1)
    plan.turn.add_(1)
    first = 0
    for slot in range(slots):
        found = (adapters == slot).nonzero().view(-1).to(torch.int32)
        tiles = -(-len(found) // TILE)
        plan.order[first * TILE :][: len(found)] = found
        plan.adapters[first : first + tiles] = slot
        first += tiles


def shrink_lora(x: Tensor | Quantized, target: LoraTarget, plan: LoraPlan, scratch: Tensor, planned: bool) -> int:
    """The definition of `shrink_lora`; scratch holds `[places, pieces, max_rank]`."""
    del planned
    _, max_rank, pieces, _ = target.a.shape
    room = scratch[: len(plan.order) * pieces * max_rank].view(-1, pieces, max_rank)
    for slot, rank, tokens, places in _groups(target, plan):
        if isinstance(x, Quantized):
            inputs = x.data[tokens].float() * x.scale[tokens]
        else:
            inputs = x[tokens].float()
        room[places, :, :rank] = torch.einsum("tk,rpk->tpr", inputs, target.a[slot, :rank].float())
    return 1


def expand_lora(y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, parts: int, planned: bool) -> None:
    """The definition of `expand_lora`, of what the definition of `shrink_lora` left."""
    assert parts == 1
    del planned
    _expand_all(y, target, plan, scratch, y.dtype)


def expand_silu_mul(
    y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, out: Tensor, parts: int, planned: bool
) -> None:
    """The definition of `expand_silu_mul`."""
    assert parts == 1
    del planned
    both = y.float()
    _expand_all(both, target, plan, scratch, y.dtype)
    gate, up = both.chunk(2, dim=1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def add_lora_embedding(y: Tensor, ids: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor) -> None:
    """The definition of `add_lora_embedding`; needs no scratch."""
    del scratch
    for slot, rank, tokens, _ in _groups(target, plan):
        shrunk = target.a[slot, :rank, 0, ids[tokens].long()].T
        _expand(y, tokens, shrunk[:, None], target, slot)


def _expand_all(y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, rounded: torch.dtype) -> None:
    """y += B·s, s being `rounded`."""
    _, max_rank, pieces, _ = target.a.shape
    room = scratch[: len(plan.order) * pieces * max_rank].view(-1, pieces, max_rank)
    for slot, rank, tokens, places in _groups(target, plan):
        _expand(y, tokens, room[places, :, :rank].to(rounded), target, slot)


def _groups(target: LoraTarget, plan: LoraPlan) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(slot, its rank, its tokens, their places) of each slot that has tokens and changes this linear."""
    ranks = target.ranks.tolist()
    owner = plan.adapters.repeat_interleave(TILE)
    for slot in sorted(set(plan.adapters.tolist()) - {-1}):
        places = ((owner == slot) & (plan.order >= 0)).nonzero().view(-1)
        if ranks[slot]:
            yield slot, ranks[slot], plan.order[places].long(), places


def _expand(y: Tensor, tokens: Tensor, shrunk: Tensor, target: LoraTarget, slot: int) -> None:
    """y[tokens] += B·shrunk, `shrunk [tokens, pieces, ranks]`; piece by piece of the rows."""
    added, row = y[tokens].float(), 0
    for piece, rows in enumerate(target.rows):
        b = target.b[slot, : shrunk.shape[2], row : row + rows].float()
        added[:, row : row + rows] += shrunk[:, piece].float() @ b
        row += rows
    y[tokens] = added.to(y.dtype)
