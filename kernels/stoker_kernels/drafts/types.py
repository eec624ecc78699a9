"""How drafts are looked for, and what a verification's forward pass needs.

Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Matching:
    """Rules of drafts from a sequence's own tokens.

    Its last tokens are looked for where they stand earlier: `least` to `most` of them, the longer the better, and of
    equals the most recent. What followed there is the draft: of `length` matched tokens at most `factor · length`, as
    long as at least `share` of all places that match as well went on so. `factor` 0 sets no bound.
    """

    least: int
    most: int
    factor: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """`R` rows of one token and `k` drafts each, as (k + 1) · R rows that decode one token; row r's draft j at j·R + r.

    slots, ids, positions, seq_lens [(k+1)·R] int32; slot_mapping [(k+1)·R] int64. A draft that there is not is padding.
    """

    slots: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
