"""SIGTERM and Ctrl-C end a fetch in order: partial files stay as they are, and the next run goes on from there.

Invariants: the handlers that were there are there again afterwards; outside the main thread, where Python lets nobody
set handlers, nothing is done.
Knows nothing of what is stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let the signals set `stop`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in wanted}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
