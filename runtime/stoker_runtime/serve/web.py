"""uvicorn as our servers run it: nothing of its own between the socket and the application, signals left to them.

Invariants: TLS is a context that was made before.
Knows nothing of routes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from stoker_runtime.serve.bounds import BoundedProtocol
from stoker_runtime.serve.even import EvenPort
from stoker_runtime.serve.port import BACKLOG

KEEP_ALIVE_SECONDS = 75
GOODBYE_SECONDS = 2.0
"""How long whoever is cut short has to take what was said."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers, and with a port that several processes share where there is one."""

    def __init__(self, config: uvicorn.Config, shared: EvenPort | None = None) -> None:
        """`shared`: where connections come from, and not from the sockets of `serve`."""
        super().__init__(config)
        self._shared = shared

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server's life cycle."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        if self._shared is not None:
            self._shared.open(partial(self._protocol, self._shared), self.config.ssl)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._shared is not None:
            self._shared.tell()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end what there is."""
        if self._shared is not None:
            self._shared.close()
        await super().shutdown(sockets)

    def _protocol(self, shared: EvenPort) -> BoundedProtocol:
        protocol = BoundedProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.over = shared.lost
        return protocol


class WebConfig(uvicorn.Config):
    """uvicorn's configuration with a TLS context that was made before."""

    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        """Resolve what uvicorn resolves."""
        super().load()
        self.ssl = self.tls


def uvicorn_config(app: Callable[..., Any], tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """uvicorn with nothing of its own between the socket and `app`, an ASGI application."""
    config = WebConfig(
        app,
        http=BoundedProtocol,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(GOODBYE_SECONDS),
        backlog=BACKLOG,
    )
    config.tls = tls
    return config
