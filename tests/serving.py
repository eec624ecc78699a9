"""Servers of `socketserver` that tests ask: each runs in a thread while its test does."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)
QUICKLY = 0.01
"""Seconds between two looks for an end."""


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Run `server`; at the end it is closed, and its thread is gone."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": QUICKLY}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
