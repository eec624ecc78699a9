"""Log-probabilities on their way to the host: chosen tokens and the best alternatives, for the rows that ask for them.

Invariants: what the sampled tokens of one step want comes back in one copy (`stoker_kernels.sampling.token_logprobs`).
Knows nothing of how tokens were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_runtime.request import TokenLogprobs


def to_host(packed: Tensor) -> Tensor:
    """Start the copy to the host; it is complete when the step's event is."""
    if packed.device.type == "cpu":
        return packed
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    return host


def unpack(packed: Tensor, tops: list[int]) -> list[TokenLogprobs]:
    """Rows of `token_logprobs` on the host → one value a row with its first `tops[i]` alternatives."""
    width = (packed.shape[1] - 2) // 2
    return [
        TokenLogprobs(
            logprob=row[0],
            rank=int(row[1]),
            top=tuple((int(row[2 + i]), row[2 + width + i]) for i in range(min(top, width))),
        )
        for row, top in zip(packed.tolist(), tops, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Sampled tokens' log-probabilities on their way: `indices` into the step's tokens, `tops` alternatives each."""

    packed: Tensor
    indices: list[int]
    tops: list[int]

    def by_index(self) -> dict[int, TokenLogprobs]:
        """Index → values; call after the step's event."""
        return dict(zip(self.indices, unpack(self.packed, self.tops), strict=True))


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """One prefill chunk's prompt log-probabilities on their way; empty `parts` when it wants none."""

    parts: list[Tensor]
    top: int

    def values(self) -> list[TokenLogprobs]:
        """One value per target; call after the step's event."""
        return [value for part in self.parts for value in unpack(part, [self.top] * part.shape[0])]
