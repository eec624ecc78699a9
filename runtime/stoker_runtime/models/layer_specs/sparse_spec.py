"""Attention of which a query sees some blocks of keys alone, by numbers.

Invariants: plain data without torch. Knows nothing of how it is computed, nor of configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """Of `layers`, the ones that see every key apart: blocks of `block` keys, of which a query sees the last `local`
    ones and every `stride`-th; that one's place moves by `step` blocks from a query head to the next (0: not at all).
    Of a rank's part `first_head` is its first one.
    """

    layers: frozenset[int]
    block: int
    local: int
    stride: int
    step: int
    first_head: int = 0

    def of_layers(self, layers: Sequence[int]) -> SparseSpec:
        """The same of these layers alone, in this order."""
        return replace(self, layers=frozenset(place for place, layer in enumerate(layers) if layer in self.layers))
