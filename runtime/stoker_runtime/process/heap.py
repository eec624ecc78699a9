"""What this process holds of the system's memory beyond its objects.

Invariants: nothing that is in use is touched but what a caller names.
Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os

LIBC = ctypes.CDLL(None, use_errno=True)


def return_free_memory() -> None:
    """Give what temporary objects took back to the system, where the C library can (glibc)."""
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def blank(address: int, size: int) -> None:
    """Make `size` bytes zeros, and give the whole pages among them back to the system: they take none until written.

    The memory has to be private and of no file, as an allocator's is. Raises OSError.
    """
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + size) // page * page
    if first >= end:
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, address + size - end)
    if LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
