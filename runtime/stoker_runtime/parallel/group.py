"""The process group of all ranks, by NCCL on GPUs and by gloo on CPUs, and its coming about while the rest is imported.

NCCL takes half a second to make a communicator, in which Python has nothing to do; a start imports for as long.

Invariants: torch's groups are one set a process.
Knows nothing of what ranks exchange. Imports torch alone.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.store import START_TIMEOUT, open_store

NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"}
"""What NCCL is told, whatever the environment says: no multicast of NVLink, which can put all GPUs of a host out of
service; and every connection at the start, not with the first sum of a size."""


def open_group(place: Place, device: torch.device, store: Store) -> None:
    """Make the group of all ranks, which meet in `store`; blocks until all are there. What is exchanged here is so on
    every rank, whether its process waits for it or a thread of it.

    Raises ConfigError in a process that has one.
    """
    if dist.is_initialized():
        raise ConfigError(
            "This process has another model on several ranks, or has lost them; close that model, or start another "
            "process.",
            param="tensor_parallel_size",
        )
    os.environ.update(NCCL)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=START_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    if place.stages == 1:
        # Two GPUs are connected when one first sends to the other, which takes 0.1 s.
        dist.all_to_all_single(*torch.zeros((2, place.world), device=device))


class EarlyGroup:
    """`open_group` in a thread of its own, of a process that ends where a start fails: the thread may wait for ever
    then, for ranks that are gone.

    It holds nothing of the group once that has been waited for: a store that goes after its group would look into a
    file that may be another's by then.
    """

    def __init__(self, place: Place, device: torch.device, store: Store) -> None:
        """Begin."""
        self._store: Store | None = store
        self._place = place
        self._device = device
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-group", daemon=True)
        self._thread.start()

    @classmethod
    def begin(cls, config: EngineConfig, place: Place, meeting: Meeting) -> EarlyGroup | None:
        """Begin on the device that the rank will have. None where a start will fail for want of GPUs."""
        device = torch.device("cpu")
        if config.device != "cpu" and torch.cuda.is_available():
            if torch.cuda.device_count() < config.local_ranks:
                return None
            device = torch.device("cuda", config.gpu_of(place.rank))
        elif config.device == "cuda":
            return None
        return cls(place, device, open_store(meeting, place))

    def wait(self) -> Store:
        """Wait for the group; where the ranks have met, which is for the caller to let go. Raises what `open_group`
        does.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        store, self._store = self._store, None
        assert store is not None, "one rank waits once"
        return store

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            assert self._store is not None, "the group is waited for once it is there"
            open_group(self._place, self._device, self._store)
        except BaseException as error:
            self._failure = error
