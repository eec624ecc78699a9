"""A rank that fails in the middle of a step: its exchange never comes, though the process lives (`silence`); or it
ends as it does where its GPU has no memory left (`memory`), or is gone (`device`).
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor

from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.ranks.follower import main

CALLS_BEFORE = 12
ERRORS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "device": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
}
answer = Collectives.sum
calls = 0


def sometimes(self: Collectives, x: Tensor) -> Tensor:
    global calls
    calls += 1
    if calls <= CALLS_BEFORE:
        return answer(self, x)
    if sys.argv[1] in ERRORS:
        raise ERRORS[sys.argv[1]]
    threading.Event().wait()
    raise AssertionError("it was to wait for ever")


if __name__ == "__main__":
    Collectives.sum = sometimes  # type: ignore[method-assign]
    sys.exit(main())
