"""Work on large bodies, beside the event loop.

Invariants: one thread does it, one body after the other. What runs in it holds the interpreter for a few milliseconds
at a time, and of several such threads each would take its turn between two steps of the loop.
Knows nothing of bodies.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LARGE_BYTES = 16 * 1024
"""Of a body: what is made of a smaller one takes the loop a few milliseconds."""
_LANE = ThreadPoolExecutor(1, thread_name_prefix="aside")


def in_turn(large: bool, work: Callable[[], T]) -> T:
    """Do `work` for a thread that may wait: where it is `large`, in the one thread that does such work.

    Never to be called by what runs in that thread.
    """
    return _LANE.submit(work).result() if large else work()


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do `work` on a body of `size` bytes; beside the loop where it is large."""
    if size <= LARGE_BYTES:
        return work()
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_LANE, lambda: context.run(work))
