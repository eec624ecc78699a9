"""Work beside the rest of a step: on a stream of its own on a GPU, which a captured graph takes for a branch.

Invariants: what is begun is joined before anything reads it; without a second stream it is done at once.
Knows nothing of what the work is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Beside:
    """One branch at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Launch `work` behind what was launched so far → what its result is asked for by, once."""
        if self._stream is None:
            return work
        branch = self._stream
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            result = work()

        def join() -> Tensor:
            torch.cuda.current_stream().wait_stream(branch)
            return result

        return join
