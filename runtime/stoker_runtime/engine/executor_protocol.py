"""What the engine asks of an executor: run a `Batch`, give back its tokens. Of one that pools: run whole texts, give
back a vector each.

Invariants: torch-free. Batches run in the order of their `execute` or `pool` calls on one device stream, so pages and
slots freed after a launch may be named by the next batch. Results are read in the same order, each once.
Knows nothing of sequences, policies or processes.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import DraftCosts, Drafting
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.models.pooling import PoolingSpec
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.pool_batch import PoolBatch
from stoker_runtime.step.result import MaskRows, StepResult
from stoker_runtime.weights.upload_ahead import UploadAhead


class Launched(Protocol):
    """A batch on its way through the device."""

    @property
    def masks(self) -> MaskRows | None:
        """For a batch with masked slots, where their masks are to be written before `sample`; else None."""
        ...

    def sample(self) -> None:
        """Choose tokens under the masks. Called once, exactly when `masks` is not None, and before `result`."""
        ...

    @property
    def batch(self) -> Batch:
        """The batch that was launched."""
        ...

    def result(self) -> StepResult:
        """Block until the tokens are on the host.

        Raises EngineError when this step failed and the executor can go on; any other exception means that
        the executor is broken and the process must end.
        """
        ...


class HostCopy(Protocol):
    """An adapter in host memory."""

    @property
    def rank(self) -> int:
        """The highest rank of its matrices."""
        ...


class AdapterHolder(Protocol):
    """Where adapters live: `slots` on the device, which batches fill, and up to `host_copies` in host memory."""

    slots: int
    host_copies: int

    def begin(self, number: int, path: str) -> Future[Any]:
        """Begin to read a PEFT folder, beside the steps. The future gives a `HostCopy`, or raises a ModelError."""
        ...

    def poll(self) -> None:
        """Called between steps while folders are being read: a future ends no sooner than that."""
        ...

    def keep(self, number: int, adapter: Any) -> None:
        """Hold what was read, under a number that batches name it by."""
        ...

    def drop(self, number: int) -> None:
        """Let go of what was read, kept or not; a slot that has it may be used on."""
        ...


class DeviceSleeper(Protocol):
    """What gives the device's memory back and takes it again, while no step is in flight. From any thread."""

    @property
    def asleep(self) -> bool:
        """Whether any part of what a step needs is not there."""
        ...

    @property
    def bytes_freed(self) -> int:
        """Bytes of the device that were given back; 0 awake."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of weights that host memory holds."""
        ...

    def sleep(self, level: int) -> None:
        """Level 1: weights to host memory, KV dropped; 2: weights dropped too. Never less deep than before.

        Raises UnavailableError; nothing has changed then.
        """
        ...

    def wake(self, tags: Collection[str]) -> None:
        """Take these parts of `WAKE_TAGS` again. Raises UnavailableError or ModelError; nothing has changed then."""
        ...


class AnyExecutor(Protocol):
    """What those that generate and those that pool have alike."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def idle(self) -> bool:
        """Use a moment without work to prepare something small; False when there is nothing left to prepare."""
        ...

    def describe(self) -> dict[str, str]:
        """What the start-up log and `/version` say: device, dtype, kernels, sizes. Never a secret."""
        ...

    def close(self) -> None:
        """Free the device. Idempotent."""
        ...


class Executor(AnyExecutor, Protocol):
    """Runs batches on one device. Sizes are final: nothing is "auto" or 0 any more.

    `num_pages` pages of `page_size` tokens; slots are `0 … max_num_seqs - 1`; a batch holds at most
    `max_num_batched_tokens` tokens, which is at least `max_num_seqs`; a sequence at most `max_model_len`.
    `host_pages` pages in host memory, 0 for none; to bring one back takes as long as to compute `host_page_tokens`.
    Where sequences have states, `host_states` of them lie beside these pages, and take `host_state_tokens` each.
    `adapters` is None where none are served. A batch verifies up to `drafting.tokens` drafts a slot and `verify_tokens`
    tokens in all; where it is None no batch does. `draft_costs` is None unless a model drafts, which keeps pages of its
    own under the same numbers and computes the `catch_ups` of a batch. `sight` is None unless layers with a window give
    up pages: a batch's updates name further page tables then, one for each of its `parts`. Where it `sees`, chunks may
    show images; with `whole_images` one that shows a part of an image shows all of it that is left.
    """

    host_pages: int
    host_page_tokens: float
    host_states: int
    host_state_tokens: float
    drafting: Drafting | None
    verify_tokens: int
    sight: Sight | None
    sees: bool
    whole_images: bool

    @property
    def keeps_states(self) -> bool:
        """Whether sequences have states beside their pages, which begin with their first token and are not shared."""
        ...

    @property
    def snapshots(self) -> int:
        """Rows behind those of the slots to which a batch copies states, and from which it brings them back."""
        ...

    @property
    def draft_costs(self) -> DraftCosts | None:
        """What passes of the model that drafts cost."""
        ...

    @property
    def adapters(self) -> AdapterHolder | None:
        """Where adapters live."""
        ...

    @property
    def sleeper(self) -> DeviceSleeper | None:
        """What puts it to sleep; None where that was not asked for."""
        ...

    def execute(self, batch: Batch) -> Launched:
        """Launch one step and return at once. Errors are raised as `Launched.result` describes.

        A batch with slots whose parameters are `masked` is launched up to its logits: its tokens are chosen
        when `Launched.sample` is called, which is before the next `execute`.
        """
        ...


class PoolLaunched(Protocol):
    """A batch on its way through the device."""

    def result(self) -> NDArray[np.float32]:
        """Block until it is done: what was pooled of each row, `[rows, size]`, as the model gave it.

        Raises EngineError when this step failed and the executor can go on; any other exception means that the
        executor is broken and the process must end.
        """
        ...


@runtime_checkable
class PoolingExecutor(AnyExecutor, Protocol):
    """Runs whole texts on one device. Sizes are final; a batch holds every text that is allowed at all.

    `num_pages` and `page_size` are 0: nothing outlives a step. `size` is the number of values in a row's result.
    """

    size: int
    pooling: PoolingSpec

    def pool(self, batch: PoolBatch) -> PoolLaunched:
        """Launch one step and return. Errors are raised as `PoolLaunched.result` describes."""
        ...


class ExecutorFactory(Protocol):
    """`stoker_runtime.executor.build.build_model` and the executors of the tests."""

    def __call__(self, config: EngineConfig, ahead: UploadAhead | None) -> Executor | PoolingExecutor:
        """Load the model, make every allocation; `ahead` is what the head start has brought to the first GPU.

        Raises ConfigError, ModelError, KernelUnavailableError.
        """
        ...
