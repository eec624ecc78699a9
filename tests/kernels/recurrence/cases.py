"""Steps for the tests of recurrences: rows that decode, go on or begin anew, padding between and behind them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.recurrence import RecurrentRows


@dataclass(frozen=True)
class Step:
    """Tokens, `slots` there are, and the slots whose states the step uses; all others rest."""

    rows: RecurrentRows
    tokens: int
    slots: int
    used: list[int]
    padded: list[int]
    """Tokens that are nobody's."""


def draw_step(rng: random.Random, device: torch.device, lengths: list[int], *, decodes_only: bool = False) -> Step:
    """Three decode rows of which one is padding and one begins; chunks of `lengths`, every second one begins; and a
    padded chunk, and padded tokens behind the last row. With `decodes_only` the decode rows alone.
    """
    lengths = [] if decodes_only else lengths
    slots = list(range(len(lengths) + 4))
    rng.shuffle(slots)
    used = slots[: len(lengths) + 2]
    row_slots = [used[0], -1, used[1], *used[2:]]
    counts = [1, 1, 1, *lengths]
    before = [rng.randrange(1, 90), -1, 0, *(0 if at % 2 else rng.randrange(1, 90) for at in range(len(lengths)))]
    if not decodes_only:
        row_slots, counts, before = [*row_slots, -1], [*counts, 0], [*before, 0]
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    seq_lens = [0 if slot < 0 else held + count for slot, held, count in zip(row_slots, before, counts, strict=True)]
    tokens = starts[-1] + (0 if decodes_only else 3)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = RecurrentRows(int32(row_slots), int32(starts), int32(seq_lens), 3, max(counts))
    return Step(rows, tokens, len(slots), used, [1, *range(starts[-1], tokens)])


def resting(shape: tuple[int, ...], step: Step, dtype: torch.dtype, device: torch.device) -> Tensor:
    """States of all slots: of those that begin anew, and of those that are not used, what nobody may read."""
    state = torch.randn(step.slots, *shape, device=device).to(dtype)
    for slot in range(step.slots):
        where = (step.rows.slots == slot).nonzero()
        row = int(where) if len(where) else -1
        spans = step.rows.query_start.tolist()
        if row < 0 or int(step.rows.seq_lens[row]) == spans[row + 1] - spans[row]:
            state[slot] = float("nan")
    return state
