"""What the ops of adapters take: one linear's matrices in all slots, and which tokens belong to which slot.

Invariants: plain views of memory that others own. A plan's sizes follow from the number of tokens and slots alone, so
a captured graph stays right whatever adapters its rows have.
Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16
"""Places of a tile: what an instruction of the tensor cores takes. Tiles of 64 are too few to shrink with."""
WORDS = 4


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One linear `[N, K]` of the model in all `G` adapter slots of up to `R` ranks.

    a:     [G, R, P, K], columns contiguous: the rows that shrink, for each of the P pieces stacked in the linear.
    b:     [G, R, N], rows contiguous: column r of the matrix that expands, the adapter's scale included.
    ranks: [G] int32, contiguous: ranks of the slot's adapter here; 0: it leaves this linear alone.
    rows:  how many of the N rows each piece has. Strides of slots, ranks and pieces are multiples of 16 elements.
    words: [WORDS] int32, zeros in the beginning, for the kernels of a planned step to wait for each other: then the
           linear runs once for each plan of its memory. None: they wait for each other's end.
    For an embedding, K is the vocabulary and N the hidden size.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    rows: tuple[int, ...]
    words: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tokens of a step by adapter slot, in tiles of TILE places that belong to one slot each.

    order: [tiles·TILE] int32, the token at each place, −1 where there is none. adapters: [tiles] int32, the slot of
    each tile, −1 for a tile without tokens. `group_tokens` fills both from `tokens [T]` int32, the slot of each token,
    and counts itself in `turn [1]` int32, which all plans share whose steps have the same targets.
    """

    order: Tensor
    adapters: Tensor
    tokens: Tensor
    turn: Tensor

    @staticmethod
    def allocate(max_tokens: int, slots: int, device: torch.device, turn: Tensor | None = None) -> LoraPlan:
        """Room for the plan of any step of up to `max_tokens` tokens; `of` gives a step's part of it.

        `turn`: that of other plans.
        """
        tiles = plan_tiles(max_tokens, slots)
        return LoraPlan(
            torch.full((tiles * TILE,), -1, dtype=torch.int32, device=device),
            torch.full((tiles,), -1, dtype=torch.int32, device=device),
            torch.empty((0,), dtype=torch.int32, device=device),
            torch.zeros((1,), dtype=torch.int32, device=device) if turn is None else turn,
        )

    def of(self, tokens: Tensor, slots: int) -> LoraPlan:
        """The part for a step whose tokens have the slots `tokens [T]` int32, −1 … slots − 1."""
        tiles = plan_tiles(len(tokens), slots)
        return LoraPlan(self.order[: tiles * TILE], self.adapters[:tiles], tokens, self.turn)


@dataclass(frozen=True, slots=True)
class LoraStep:
    """What a step's linears share. scratch: fp32, `scratch_elements` of it, in use by one linear at a time.

    planned: `group_tokens` and the launch after it have ended before the launch before a linear's first one began, so
    that the plan may be read ahead of the launch's turn.
    """

    plan: LoraPlan
    scratch: Tensor
    planned: bool = False


def plan_tiles(tokens: int, slots: int) -> int:
    """Tiles that suffice for `tokens` tokens, however they are spread over `slots` slots."""
    return min(tokens, tokens // TILE + slots)
