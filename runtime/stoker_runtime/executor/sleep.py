"""What an executor gives back while it sleeps, and takes again: weights, KV, adapters' slots, graphs and workspace.

    level 1   weights rest in host memory (on a CPU: where they are); KV is dropped
    level 2   weights are dropped, and read from their files again, adapters in host memory too

Tensors keep their shapes and lose their memory: torch's storages are made empty and filled again, perhaps elsewhere,
and every view follows. Only graphs and tapes hold addresses: they are dropped. Whoever runs steps captures them again,
from kernels that are loaded.

Invariants: called while no step is in flight, and no step comes before both parts are awake. What fails changes
nothing: who was awake stays so, and what sleeps takes nothing of the device.
Knows nothing of requests, and of what was cached in pages: that is forgotten by whoever calls.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker_kernels.quant import LinearWeight
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.errors import UnavailableError
from stoker_runtime.executor.device import hold
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.executor.host_memory import free_host_memory
from stoker_runtime.executor.resolve import GIB, MemoryPlan
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.vision.tower import Tower
from stoker_runtime.process.heap import blank, return_free_memory
from stoker_runtime.request import KV_CACHE, WAKE_TAGS, WEIGHTS
from stoker_runtime.weights.copy_lanes import locked_pages, unlock_pages

log = logging.getLogger(__name__)


class Holder(Protocol):
    """What holds a device's memory: an executor."""

    @property
    def device(self) -> torch.device: ...
    @property
    def plan(self) -> MemoryPlan: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def arena(self) -> Tensor: ...
    @property
    def states(self) -> tuple[Tensor, ...]: ...
    @property
    def drafter(self) -> Drafter | None: ...
    @property
    def tower(self) -> Tower | None: ...
    @property
    def adapters(self) -> AdapterMemory | None: ...
    def forget_steps(self) -> None: ...


class Block:
    """The memory of a tensor and of all its views."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self.nbytes = storage.nbytes()
        self.host: Tensor | None = None
        """The host's copy, page-locked."""

    def keep(self) -> None:
        """Copy it to the host. Raises UnavailableError where the system locks no more memory."""
        self.host = locked(self.nbytes)
        self.host.copy_(self._bytes())

    def forget(self) -> None:
        """Let go of the host's copy. Idempotent."""
        if self.host is not None:
            unlock_pages(self.host)
            self.host = None

    def release(self) -> None:
        """Give the memory back, and with it what it held."""
        if self._storage.resizable():
            self._storage.resize_(0)
        else:
            # Memory that numpy allocated, on a CPU: it stays where it is and reads as zeros.
            blank(self._storage.data_ptr(), self.nbytes)

    def restore(self) -> None:
        """Have memory again, with what the host kept in it, or zeros. Raises torch.OutOfMemoryError."""
        if not self._storage.resizable():
            return
        self._storage.resize_(self.nbytes)
        if self.host is None:
            self._bytes().zero_()
        else:
            self._bytes().copy_(self.host)

    def _bytes(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return empty.set_(self._storage)


class DeviceSleep:
    """Puts one executor to sleep and wakes it. Called from one thread at a time, any one."""

    def __init__(self, executor: Holder, reload: Callable[[], Sequence[DecoderWeights]]) -> None:
        """`reload` reads the weights from their files again: the model's, then those of a draft model, if any."""
        self.bytes_freed = 0
        self._executor = executor
        self._reload = reload
        self._on_gpu = executor.device.type == "cuda"
        self._gone: set[str] = set()
        """Parts that sleep."""
        self._woken: list[str] = []
        """Parts that the last `take` woke."""
        drafter, slabs = executor.drafter, () if executor.adapters is None else (executor.adapters.slab,)
        arenas = (executor.arena,) if drafter is None else (executor.arena, *drafter.arenas)
        self._decoders = [executor.decoder] if drafter is None else [executor.decoder, drafter.decoder]
        self._kv = [Block(tensor.untyped_storage()) for tensor in (*arenas, *executor.states, *slabs)]
        self.reload_tower: Callable[[], dict[str, Tensor]] | None = None
        """Reads the weights of what sees from their files again."""
        self._weights: list[Block] = []
        """What the weights stand in; where the host keeps them, they come back from there."""

    @property
    def host_bytes(self) -> int:
        """Bytes of weights in host memory."""
        return sum(block.nbytes for block in self._weights if block.host is not None)

    @property
    def asleep(self) -> bool:
        """Whether any part sleeps."""
        return bool(self._gone)

    def sleep(self, level: int) -> None:
        """Give the memory back; who sleeps already goes down to a deeper level, and never up.

        Raises UnavailableError where the host has no room for the weights.
        """
        self.prepare(level)
        self.release(level)

    def wake(self, tags: Collection[str]) -> None:
        """Take the memory of these parts again, and the weights from where they are.

        Raises UnavailableError where the device has no room, ModelError for files that are not what they were.
        """
        self.take(tags)
        self.settle()

    @torch.inference_mode()
    def prepare(self, level: int) -> None:
        """What of `sleep` may fail: nothing has changed then. `release` follows, or `settle`."""
        self._enter()
        if level == 1 and self._on_gpu and WEIGHTS not in self._gone:
            self._keep_weights()

    @torch.inference_mode()
    def release(self, level: int) -> None:
        """The rest of `sleep`."""
        began, free = time.perf_counter(), self._enter()
        if KV_CACHE not in self._gone:
            self._release_kv()
        if WEIGHTS not in self._gone and (level > 1 or self._on_gpu):
            self._release_weights()
        if level > 1:
            self._forget_kept()
        self._trim()
        self._count(free)
        log.info(
            "asleep at level %d in %.2f s: %.2f GiB are given back, %.2f GiB of weights are in host memory",
            level, time.perf_counter() - began, self.bytes_freed / GIB, self.host_bytes / GIB,
        )  # fmt: skip

    @torch.inference_mode()
    def take(self, tags: Collection[str]) -> None:
        """What of `wake` may fail: nothing has changed then. `settle` follows, or `undo`."""
        began, free = time.perf_counter(), self._enter()
        self._woken = []
        try:
            for part in (part for part in WAKE_TAGS if part in tags and part in self._gone):
                self._gone.discard(part)
                self._woken.append(part)
                (self._restore_weights if part == WEIGHTS else self._restore_kv)()
            if not self._gone and self._woken:
                self._take_workspace()
        except BaseException as error:
            # Whatever was taken for it is free again before anybody is told.
            traceback.clear_frames(error.__traceback__)
            self._undo(free)
            if isinstance(error, torch.OutOfMemoryError):
                raise UnavailableError(self._no_room(), code="no_memory") from error
            raise
        self._count(free)
        if self._woken:
            log.info("%s awake in %.2f s", " and ".join(self._woken), time.perf_counter() - began)

    @torch.inference_mode()
    def undo(self) -> None:
        """What the last `take` woke sleeps on."""
        self._undo(self._enter())

    def _undo(self, free: int) -> None:
        """`free` bytes were free when what was freed was counted last."""
        if KV_CACHE in self._woken:
            self._release_kv()
        if WEIGHTS in self._woken:
            self._release_weights()
        self._woken = []
        self._trim()
        self._count(free)

    def settle(self) -> None:
        """Things stand as they are: what the host kept for it is of no use any more."""
        self._woken = []
        if WEIGHTS not in self._gone:
            self._forget_kept()

    def _enter(self) -> int:
        """Wait for the device, which is this thread's from here on; bytes that are free."""
        if not self._on_gpu:
            return self._free()
        torch.cuda.set_device(self._executor.device)
        torch.cuda.synchronize()
        return self._free()

    def _free(self) -> int:
        """Bytes of the device that are free, counted from somewhere."""
        if self._on_gpu:
            return torch.cuda.mem_get_info(self._executor.device)[0]
        pages = sum(block.nbytes for block in self._kv)
        return (pages if KV_CACHE in self._gone else 0) + (self._executor.plan.weights if WEIGHTS in self._gone else 0)

    def _trim(self) -> None:
        """Give back what torch and the C library keep of what was released."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return_free_memory()

    def _count(self, free: int) -> None:
        """Count what is free now and was not, when `free` bytes were."""
        self.bytes_freed = self.bytes_freed + self._free() - free if self._gone else 0

    def _keep_weights(self) -> None:
        self._weights = self._blocks()
        needed, free = sum(block.nbytes for block in self._weights), free_host_memory()
        if needed > free:
            raise UnavailableError(
                f"{needed / GIB:.2f} GiB of weights do not fit into the {free / GIB:.2f} GiB of host memory that are "
                "free; sleep at level 2.",
                code="no_memory",
            )
        try:
            for block in self._weights:
                block.keep()
        except BaseException:
            self._forget_kept()
            raise

    def _release_kv(self) -> None:
        self._executor.forget_steps()
        for block in self._kv:
            block.release()
        self._gone.add(KV_CACHE)

    def _restore_kv(self) -> None:
        for block in self._kv:
            block.restore()

    def _release_weights(self) -> None:
        self._executor.forget_steps()
        kept = self._weights if self.host_bytes else self._blocks()
        for block in kept:
            block.release()
        if not self.host_bytes:
            for decoder in self._decoders:
                decoder.renew(hollow(decoder.weights))
            if (tower := self._executor.tower) is not None:
                tower.renew({})
        self._gone.add(WEIGHTS)

    def _take_workspace(self) -> None:
        """Graphs are captured by whoever runs steps, in a pool of their own, for which there has to be room."""
        hold(self._executor.plan.workspace, self._executor.device)
        if self._on_gpu and self._free() < self._executor.plan.graphs:
            raise UnavailableError(self._no_room(), code="no_memory")

    def _restore_weights(self) -> None:
        if not self.host_bytes:
            for decoder, weights in zip(self._decoders, self._reload(), strict=True):
                decoder.renew(weights)
            if (tower := self._executor.tower) is not None and self.reload_tower is not None:
                tower.renew(self.reload_tower())
            if self._executor.adapters is not None:
                self._executor.adapters.read_again()
            return
        for block in self._weights:
            block.restore()

    def _blocks(self) -> list[Block]:
        """What the weights stand in."""
        tower = self._executor.tower
        seeing = blocks_of(tuple(tower.weights.values())) if tower is not None else []
        return [block for decoder in self._decoders for block in blocks_of(decoder.weights)] + seeing

    def _forget_kept(self) -> None:
        for block in self._weights:
            block.forget()
        self._weights = []

    def _no_room(self) -> str:
        free, _ = torch.cuda.mem_get_info(self._executor.device)
        return (
            f"The device has no room to wake up: {self.bytes_freed / GIB:.2f} GiB were given back, {free / GIB:.2f} "
            "GiB are free. Others have to give theirs back first; it sleeps on."
        )


def locked(nbytes: int) -> Tensor:
    """Bytes of the host that the device's copy engines reach. Raises UnavailableError where they cannot be had."""
    try:
        return locked_pages(nbytes)
    except OSError as error:
        raise UnavailableError(f"{nbytes / GIB:.2f} GiB of host memory: {error}.", code="no_memory") from error
    except torch.cuda.CudaError as error:
        raise UnavailableError(
            f"{nbytes / GIB:.2f} GiB of host memory for weights cannot be locked ({error}); sleep at level 2, or raise "
            "the limit of locked memory (ulimit -l).",
            code="no_memory",
        ) from error


def blocks_of(weights: DecoderWeights | tuple[Tensor, ...]) -> list[Block]:
    """The memory of all tensors, each once, but for experts that rest in host memory: these stay."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(weights):
        storage = tensor.untyped_storage()
        if storage.nbytes() and (storage.resizable() or storage.device.type == "cpu"):
            found.setdefault(storage.data_ptr(), storage)
    return [Block(storage) for storage in found.values()]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors within nested records; those in a CPU library's own order have no memory of torch's."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def hollow(weights: DecoderWeights) -> DecoderWeights:
    """What is left of weights whose memory was given back."""
    return replace(weights, layers=(), head=LinearWeight(weights.final_norm.new_empty((0, 1)), None, "dense"))
