"""What a run of the reference rounds on purpose: a part of the oracle `reference.model`.

A router's choice is a comparison, so where two experts weigh nearly alike an engine's rounding takes one or the other,
and another expert is another result. Whether that is why a token differs is asked by moving what routers say by as
little as roundings do, several times over.
Invariants: a run with the same numbers gives the same result. Knows nothing of what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUTER_NOISE = 0.01
"""Standard deviation of what bf16 moves a router's logits by, as a part of their spread over the experts: its input and
the logits themselves are rounded to 0.2 to 0.4%, the stream below them to as much again in each layer.
"""


@dataclass(frozen=True, slots=True)
class Rounding:
    """`dtype`: of the residual stream after each layer, and of what a router reads and says. `noise`: what a router's
    logits are moved by beside, at random, in parts of their spread; drawn with `seed`.
    """

    dtype: torch.dtype = torch.float32
    noise: float = 0.0
    seed: int = 0
    _draws: torch.Generator = field(default_factory=torch.Generator, compare=False)

    def begin(self) -> None:
        """Before a run, so that each draws alike."""
        self._draws.manual_seed(self.seed)

    def rounded(self, x: Tensor) -> Tensor:
        """x in fp32, of what `dtype` leaves of it."""
        return x.to(self.dtype).float()

    def moved(self, logits: Tensor) -> Tensor:
        """A router's logits `[T, E]`, rounded and moved."""
        logits = self.rounded(logits)
        if not self.noise:
            return logits
        drawn = torch.randn(logits.shape, generator=self._draws).to(logits.device)
        return logits + self.noise * logits.std(dim=1, keepdim=True) * drawn


NONE = Rounding()
"""Nothing is rounded."""
