"""What every caller has used of the minute, in memory that all API processes of one server share.

A table of slots: whose it is (a digest of the owner), and when the buckets of requests and tokens are full again. An
owner's slot is one of the few behind the place that its digest names.
Invariants: who reads or writes a slot holds the lock, which is the kernel's and ends with its process. A slot whose
buckets are full may become anybody's: its owner has as much without one. So the table never has to be cleaned, and an
owner that was counted once is never counted in two slots.
Knows nothing of limits.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from stoker_runtime.errors import CapacityError

SLOTS = 16384
REACH = 64
"""How many slots may be an owner's."""
_NAME = 16
_SLOT = 32
_EMPTY = bytes(_NAME)
REQUESTS, TOKENS = 0, 1
"""Where an account has the time at which its bucket is full again."""


class Ledger:
    """The accounts of one server. Without `path` they are this process's own."""

    def __init__(self, path: str = "") -> None:
        """`path` is a file that all processes of the server name; it is made by whoever is first."""
        size = SLOTS * _SLOT
        self._file = -1
        if path:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Taken now: a page that finds a full disk at its first write would end the process by a signal.
            os.posix_fallocate(self._file, 0, size)
            view = memoryview(mmap.mmap(self._file, size))
        else:
            view = memoryview(bytearray(size))
        self._names = view
        self._times = view.cast("d")

    @contextmanager
    def account(self, owner: str, now: float) -> Iterator[memoryview[float]]:
        """The two times of an owner, to read and to write while nobody else does. Raises CapacityError."""
        # Held for microseconds: nothing is waited for inside.
        if self._file >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            at = self._find(blake2b(owner.encode(), digest_size=_NAME).digest(), now)
            yield self._times[at * 4 + 2 : at * 4 + 4]
        finally:
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _find(self, name: bytes, now: float) -> int:
        """The slot of `name`, taken now if it has none."""
        start, free = int.from_bytes(name[:8], "little"), -1
        for step in range(REACH):
            at = (start + step) % SLOTS
            found = bytes(self._names[at * _SLOT : at * _SLOT + _NAME])
            if found == name:
                return at
            if free < 0 and (found == _EMPTY or max(self._times[at * 4 + 2 : at * 4 + 4]) <= now):
                free = at
            if found == _EMPTY:
                break
        if free < 0:
            raise CapacityError("More keys ask at a time than rate limits can be counted for.")
        self._names[free * _SLOT : free * _SLOT + _NAME] = name
        self._times[free * 4 + 2] = self._times[free * 4 + 3] = 0.0
        return free
