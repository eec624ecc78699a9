"""The server's port: one listening socket, which several processes may accept from (`even.py`).

Invariants: a port that somebody else has is an error, never joined.
Knows nothing of what is spoken on it.
"""

from __future__ import annotations

import socket

from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import ConfigError

BACKLOG = 4096


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    # The protocol is named because asyncio switches off the delay of small packets only where it is.
    listener: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # From here on connections wait instead of being refused.
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}.", param="port") from error
    return listener


def address(config: ServerConfig, listener: socket.socket) -> str:
    """Where `listener` listens, as a URL."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"
