"""The immutable description of one step of a model that pools: whole texts that run together.

Invariants: plain data, no torch. Vectors come back in the order of `rows`.
Knows nothing of requests, of policies, or of what is made of the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One whole text; tokens from `second_segment` on belong to the second text of a pair (0: there is one text)."""

    token_ids: tuple[int, ...]
    second_segment: int = 0


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """One step: texts that run together."""

    step: int
    rows: tuple[PoolRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(row.token_ids) for row in self.rows)
