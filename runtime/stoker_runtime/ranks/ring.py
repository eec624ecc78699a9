"""A ring of messages in shared memory: one process writes, several read, each message reaches all of them in order.

A message takes one slot or several; a slot's number says whether it is there. Readers sleep on the newest number by
futex, so that a message takes microseconds and waiting takes no processor. Each reader writes down which slot it took
last; the writer never overtakes the slowest by more than the ring.

    [newest 8 | pad to 64] [taken by reader 0, 64 bytes a reader …] [slot 0] [slot 1] …
    slot: [number 8 | length 4 | is the message's last 4 | bytes …]

Invariants: the memory has no name, so that nothing of it is left when its processes are gone. Numbers start at 1 and
only grow. Between the bytes of a slot and its number, and before the bytes are read, stands a system call, which orders
them on every processor.
Knows nothing of what messages mean.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable

SLOTS = 16
SLOT_BYTES = 256 * 1024
LINE = 64
HEADER = struct.Struct("<qii")
NUMBER = struct.Struct("<q")
BYTES_PER_SLOT = SLOT_BYTES - HEADER.size
FULL_SECONDS = 0.001
FUTEX = {"x86_64": 202, "aarch64": 98}
WAIT, WAKE, EVERYBODY = 0, 1, 2**31 - 1


class Ring:
    """The memory, as the writer or a reader sees it."""

    def __init__(self, descriptor: int, readers: int) -> None:
        """Map the memory that `create` made for so many `readers`."""
        self.descriptor = descriptor
        self._readers = readers
        self._memory = mmap.mmap(descriptor, ring_bytes(readers))
        self._written = 0
        self._futex = Futex(self._memory)

    @classmethod
    def create(cls, readers: int) -> Ring:
        """A new ring. Its `descriptor` is for the readers to inherit."""
        descriptor = os.memfd_create("stoker-ring")
        os.ftruncate(descriptor, ring_bytes(readers))
        return cls(descriptor, readers)

    def write(self, message: bytes, stalled: Callable[[], None]) -> None:
        """Append a message; while the slowest reader leaves no room, `stalled` is called again and again, and may
        raise.
        """
        for at in range(0, max(1, len(message)), BYTES_PER_SLOT):
            self._write_slot(message[at : at + BYTES_PER_SLOT], at + BYTES_PER_SLOT >= len(message), stalled)

    def _write_slot(self, part: bytes, last: bool, stalled: Callable[[], None]) -> None:
        number = self._written + 1
        while number - min(map(self.taken, range(self._readers)), default=number) > SLOTS:
            stalled()
            time.sleep(FULL_SECONDS)
        at = self._slot(number)
        self._memory[at + HEADER.size : at + HEADER.size + len(part)] = part
        HEADER.pack_into(self._memory, at, number, len(part), last)
        self._futex.order()
        NUMBER.pack_into(self._memory, 0, number)
        self._futex.wake()
        self._written = number

    def taken(self, reader: int) -> int:
        """The last slot that a reader has taken."""
        return int(NUMBER.unpack_from(self._memory, LINE * (1 + reader))[0])

    def read(self, reader: int) -> bytes:
        """The next message for this reader; blocks until it is there."""
        parts = []
        while True:
            number = self.taken(reader) + 1
            while (newest := NUMBER.unpack_from(self._memory, 0)[0]) < number:
                self._futex.wait(newest)
            self._futex.order()
            at = self._slot(number)
            _, length, last = HEADER.unpack_from(self._memory, at)
            parts.append(self._memory[at + HEADER.size : at + HEADER.size + length])
            NUMBER.pack_into(self._memory, LINE * (1 + reader), number)
            if last:
                return b"".join(parts) if len(parts) > 1 else parts[0]

    def _slot(self, number: int) -> int:
        return LINE * (1 + self._readers) + number % SLOTS * SLOT_BYTES

    def close(self) -> None:
        """Let go of the memory; it is gone with its last process. Idempotent."""
        if self.descriptor >= 0:
            self._futex.close()
            self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1


class Futex:
    """Sleeps on the first word of shared memory. Linux's own call: Python has no way to sleep between processes."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory)
        self._address = ctypes.byref(self._word)
        self._call = ctypes.CDLL(None).syscall
        self._number = FUTEX[platform.machine()]

    def wait(self, seen: int) -> None:
        """Return once the word is no longer what was `seen`, or now and then before."""
        self._call(self._number, self._address, WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF), None, None, 0)

    def wake(self) -> None:
        """Wake everybody who sleeps."""
        self._call(self._number, self._address, WAKE, EVERYBODY, None, None, 0)

    def order(self) -> None:
        """What was read or written before this stays before what comes after."""
        self._call(self._number, self._address, WAKE, 0, None, None, 0)

    def close(self) -> None:
        """Let go of the memory, which could not be closed else."""
        del self._word, self._address


def ring_bytes(readers: int) -> int:
    """Size of the memory."""
    return LINE * (1 + readers) + SLOTS * SLOT_BYTES
