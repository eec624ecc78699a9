"""The rows of a step as recurrences see them: whose state is where, and which tokens go through it.

Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Tokens that a chunk of the delta rule has: as wide is the triangle that is solved for each.
DELTA_CHUNK = 32


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """`S` rows, padded. Rows `[0, num_decodes)` have one token each, the rest up to `max_query_len`.

    slots [S] int32: where a row's state rests; query_start [S+1] int32: offsets of its tokens; seq_lens [S] int32:
    tokens of its sequence, this step's included, 0 for a padded row, whose state nobody reads or writes.
    """

    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int

    @property
    def count(self) -> int:
        """Rows, padding included."""
        return int(self.slots.shape[0])
