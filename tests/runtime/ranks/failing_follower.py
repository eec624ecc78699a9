"""A rank whose step fails as it does where its GPU has no memory left (`memory`), or is gone (`device`)."""

from __future__ import annotations

import sys

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
    if calls > CALLS_BEFORE:
        raise ERRORS[sys.argv[1]]
    return answer(self, x)


if __name__ == "__main__":
    Collectives.sum = sometimes  # type: ignore[method-assign]
    sys.exit(main())
