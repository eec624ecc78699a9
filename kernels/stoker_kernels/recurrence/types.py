"""The rows of a step as recurrences see them: whose state is where, and which tokens go through it.

Of tokens that may be taken back, too: these go through a state that stays, and what they do to it is kept beside it.

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


@dataclass(frozen=True, slots=True)
class DraftRows:
    """`R` rows of up to `steps` tokens each, of which the last ones may be taken back; token t of row r is t·R + r.

    slots [R] int32: where a row's state rests, below 0 for padding; seq_lens [steps·R] int32: tokens of the sequence up
    to this one, 0 for a token that there is not, and none follows it. Each row has a state: it began before.
    """

    slots: Tensor
    seq_lens: Tensor
    steps: int

    @property
    def count(self) -> int:
        """Rows, padding included."""
        return int(self.slots.shape[0])


@dataclass(frozen=True, slots=True)
class Tried:
    """What the tokens of `DraftRows` would do to states, until it is known which of them count. `T` = steps·R.

    inputs [T, C]: what convolutions read, mixed [T, C]: what they gave, gates [T, 2, H] fp32: two numbers a head. Of
    one layer, or of all with a dimension in front; whatever is longer than T is not touched.
    """

    inputs: Tensor
    mixed: Tensor
    gates: Tensor
