"""What the engine asks of an executor that pools: run whole texts, give back a vector each.

Invariants: torch-free. Batches run in the order of their `pool` calls; results are read in the same order, each once.
Knows nothing of sequences, policies or processes.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.models.pooling import PoolingSpec
from stoker_runtime.step.pool_batch import PoolBatch


class PoolLaunched(Protocol):
    """A batch on its way through the device."""

    def result(self) -> NDArray[np.float32]:
        """Block until it is done: what was pooled of each row, `[rows, size]`, as the model gave it.

        Raises EngineError when this step failed and the executor can go on; any other exception means that the
        executor is broken and the process must end.
        """
        ...


@runtime_checkable
class PoolingExecutor(Protocol):
    """Runs whole texts on one device. Sizes are final; a batch holds every text that is allowed at all.

    `num_pages` and `page_size` are 0: nothing outlives a step. `size` is the number of values in a row's result.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    size: int
    pooling: PoolingSpec

    def pool(self, batch: PoolBatch) -> PoolLaunched:
        """Launch one step and return. Errors are raised as `PoolLaunched.result` describes."""
        ...

    def idle(self) -> bool:
        """Use a moment without work to prepare something small; False when there is nothing left to prepare."""
        ...

    def describe(self) -> dict[str, str]:
        """What the start-up log and `/version` say. Never a secret."""
        ...

    def close(self) -> None:
        """Free the device. Idempotent."""
        ...
