"""What of the CUDA driver is needed before torch is there: a device's context, memory, and copies from the host.

Invariants: every call releases the interpreter's lock while it runs, and a status other than success is a DriverError.
The context is the device's primary one, which the CUDA runtime, and so torch, takes over.
Knows nothing of what is copied.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY = "libcuda.so.1"

log = logging.getLogger(__name__)


class DriverError(Exception):
    """The driver is missing or refused a call; the text names it."""


class CudaDriver:
    """The driver with a device's primary context."""

    def __init__(self, device: int = 0) -> None:
        """Load the driver and create the context of the device of this number. Raises DriverError."""
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}") from error
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def enter(self) -> None:
        """Make the context the calling thread's: due before any call below."""
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, count: int) -> int:
        """The address of `count` new bytes on the device."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    @contextmanager
    def pinned(self, count: int) -> Iterator[memoryview]:
        """A buffer of the host that the device reads at full speed."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(count), 0)
        try:
            yield memoryview((ctypes.c_ubyte * count).from_address(address.value or 0)).cast("B")
        finally:
            self._call("cuMemFreeHost", address)

    def copy(self, address: int, source: memoryview) -> None:
        """Copy bytes of a pinned buffer to the device; done when this returns."""
        place = ctypes.c_void_p(ctypes.addressof(ctypes.c_ubyte.from_buffer(source)))
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), place, ctypes.c_size_t(len(source)))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(f"{name}: CUDA error {status}")


def begin_context(device: int) -> None:
    """Begin to create a device's context, in a thread, before torch asks for it: it takes a quarter of a second.
    Nothing where it fails: torch meets that again, and says it.
    """

    def create() -> None:
        try:
            CudaDriver(device)
        except DriverError as error:
            log.debug("no context ahead: %s", error)

    threading.Thread(target=create, name="stoker-context", daemon=True).start()
