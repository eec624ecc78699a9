"""A Service on this machine: one port, connections dealt round-robin to the ready pods.

Invariants: a connection that is open stays with its pod until either side ends it, so a stream survives its pod's
drain; listens from the first ready pod on, so "connection refused" means "not ready", as in a cluster.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

_BLOCK = 64 * 1024

Backends = Callable[[], Sequence[tuple[str, int]]]


class Proxy:
    """Listens on `host`:`port`; `backends` names the addresses that are ready at this moment."""

    def __init__(self, host: str, port: int, backends: Backends) -> None:
        self.host = host
        self.port = port
        self._backends = backends
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; does nothing when it listens already. Raises OSError when the port is taken."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, self.host, self.port)

    def refuse(self) -> None:
        """Accept no more; what is open goes on."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Accept no more, and end what is still open."""
        self.refuse()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        try:
            upstream = await self._connect()
            if upstream is not None:
                await _join((reader, writer), upstream)
        except asyncio.CancelledError:
            # Only `stop` cancels; the streams are closed below.
            return
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the next ready pod; the others are tried when it just went away."""
        ready = list(self._backends())
        self._turn += 1
        for offset in range(len(ready)):
            host, port = ready[(self._turn + offset) % len(ready)]
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(host, port)
        return None


async def _join(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter], pod: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carry bytes both ways until the pod ends, or until the client is gone."""
    upward = asyncio.create_task(_carry(client[0], pod[1]))
    downward = asyncio.create_task(_carry(pod[0], client[1]))
    try:
        await asyncio.wait((upward, downward), return_when=asyncio.FIRST_COMPLETED)
        if not downward.done() and client[0].at_eof():
            # A client may end its half after the request and still read the answer.
            await downward
    finally:
        upward.cancel()
        downward.cancel()
        await asyncio.gather(upward, downward, return_exceptions=True)
        pod[1].close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
