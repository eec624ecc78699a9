"""Listens at the ports of the services that may sleep.

Invariants: a port that cannot be had now is tried again; one that is no service's any more is closed, and what came in
by it is answered to its end. Once closed, none is opened again.
Knows nothing of services.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

log = logging.getLogger("stoker.activator")
AGAIN_SECONDS = 2.0
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Doors:
    """`handle` gets what comes in at `host`, "" = every address of this machine."""

    def __init__(self, handle: Handle, host: str) -> None:
        self._server = web.Server(
            handle, access_log=None, handler_cancellation=True, auto_decompress=False, keepalive_timeout=5.0
        )
        self._host = host or None
        self._runner = web.ServerRunner(self._server)
        self._open: dict[int, web.TCPSite] = {}
        self._wanted: frozenset[int] = frozenset()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def open(self) -> frozenset[int]:
        """The ports that are listened at."""
        return frozenset(self._open)

    def want(self, ports: frozenset[int]) -> None:
        """Listen at these, and at no others."""
        if ports != self._wanted and not self._closed:
            self._wanted = ports
            self._changed.set()

    def close(self) -> None:
        """Listen at none from now on."""
        self.want(frozenset())
        self._closed = True

    async def run(self) -> None:
        """Open and close until cancelled; what was let in by then is cut off."""
        await self._runner.setup()
        try:
            while True:
                self._changed.clear()
                wanted = self._wanted
                for port in self._open.keys() - wanted:
                    await self._open.pop(port).stop()
                for port in sorted(wanted - self._open.keys()):
                    await self._try(port)
                missing = wanted - self._open.keys()
                try:
                    async with asyncio.timeout(AGAIN_SECONDS if missing else None):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            await self._runner.cleanup()

    async def _try(self, port: int) -> None:
        site = web.TCPSite(self._runner, self._host, port)
        try:
            await site.start()
        except OSError as error:
            log.error("port %d cannot be opened: %s", port, error)
            await site.stop()
            return
        self._open[port] = site
