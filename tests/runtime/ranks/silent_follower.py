"""A rank that stops answering in the middle of a step: one of its exchanges never comes, though the process lives."""

from __future__ import annotations

import sys
import threading

from torch import Tensor

from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.ranks.follower import main

CALLS_BEFORE = 12
answer = Collectives.sum
calls = 0


def sometimes(self: Collectives, x: Tensor) -> Tensor:
    global calls
    calls += 1
    if calls > CALLS_BEFORE:
        threading.Event().wait()
    return answer(self, x)


if __name__ == "__main__":
    Collectives.sum = sometimes  # type: ignore[method-assign]
    sys.exit(main())
