"""A driver whose device is the host's memory: what `UploadAhead` does, without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker_runtime.weights.cuda_driver import DriverError


class HostDriver:
    """Counts what is taken and given back; `fails` names a call that is refused, `gate` holds copies back."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.gate = threading.Event()
        self.gate.set()
        self.blocks: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
        self.buffers = 0

    def enter(self) -> None:
        self._refuse("enter")

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def allocate(self, count: int) -> int:
        self._refuse("allocate")
        block = (ctypes.c_ubyte * count)()
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.blocks[address]

    @contextmanager
    def pinned(self, count: int) -> Iterator[memoryview]:
        self._refuse("pinned")
        self.buffers += 1
        yield memoryview(bytearray(count))
        self.buffers -= 1

    def copy(self, address: int, source: memoryview) -> None:
        self._refuse("copy")
        assert self.gate.wait(10)
        ctypes.memmove(address, (ctypes.c_ubyte * len(source)).from_buffer(source), len(source))

    def _refuse(self, call: str) -> None:
        if call == self.fails:
            raise DriverError(f"{call} is refused")


def host_bytes_at(address: int, count: int) -> torch.Tensor:
    """What `uploaded.bytes_at` is for memory of the device."""
    return torch.frombuffer((ctypes.c_ubyte * count).from_address(address), dtype=torch.uint8)
