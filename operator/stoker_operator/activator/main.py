"""The activator's process: settings → health endpoint → the services' ports. `stoker activator`.

Invariants: it is ready once it knows the services, so nobody is led here before; after SIGTERM it takes requests for as
long as anybody may still be led here, closes its ports, and ends with the last one that it has. What has no answer when
its time to drain is over is told to come again.
Exit status: 0 after a signal, 2 for a bad setting.
Knows nothing of what becomes of a request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Sequence

from aiohttp import web

from stoker_operator import process
from stoker_operator.activator.bodies import MIB, Bodies
from stoker_operator.activator.directory import Directory, Sleeper
from stoker_operator.activator.doors import Doors
from stoker_operator.activator.forward import make_session
from stoker_operator.activator.handler import Handler
from stoker_operator.activator.line import Line
from stoker_operator.activator.settings import ActivatorSettings, from_arguments
from stoker_operator.activator.wake import Waker
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.queue import Key
from stoker_operator.settings import SettingsError

log = logging.getLogger("stoker.activator")
_API_REQUESTS = 8
_LOOK_SECONDS = 0.2
# For the last answers to be written.
_LAST_SECONDS = 5.0


class Activator:
    """One replica. `run` it until `stop` is set."""

    def __init__(self, cluster: Cluster, settings: ActivatorSettings) -> None:
        self._settings = settings
        self._waker = Waker(cluster)
        self._lines: dict[Key, Line] = {}
        self._by_port: dict[int, Line] = {}
        self._leaving = False
        self.directory = Directory(cluster, settings.namespaces, self._service_changed)
        self.doors: Doors | None = None
        self.health_port = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Serve; the caller closes the cluster."""
        settings = self._settings
        bodies = Bodies(settings.body_mib * MIB, settings.held_mib * MIB)
        async with make_session() as session:
            handler = Handler(self._by_port, session, bodies, settings.heartbeat_seconds)
            self.doors = Doors(handler.handle, settings.http_host)
            health = await self._serve_health()
            try:
                leave = functools.partial(self._leave, handler)
                await process.work_until(stop, self.doors.run(), self.directory.run(), leave=leave)
            finally:
                await self._waker.close()
                await health.cleanup()

    async def _leave(self, handler: Handler) -> None:
        self._leaving = True
        await asyncio.sleep(self._settings.leave_seconds)
        if self.doors is not None:
            self.doors.close()
        await _until_idle(handler, self._settings.drain_seconds)
        if handler.under_way:
            log.warning("%d requests have no answer yet, and there is no more time", handler.under_way)
        handler.end()
        await _until_idle(handler, _LAST_SECONDS)

    def _service_changed(self, key: Key, sleeper: Sleeper | None) -> None:
        line = self._lines.get(key)
        if line is not None:
            self._by_port.pop(line.sleeper.port, None)
            line.update(sleeper)
        if sleeper is None:
            self._lines.pop(key, None)
            self._waker.forget(key)
        else:
            line = line or Line(sleeper, self._waker.call)
            self._lines[key] = self._by_port[sleeper.port] = line
        if self.doors is not None:
            self.doors.want(frozenset(self._by_port))

    async def _serve_health(self) -> web.AppRunner:
        """Start /healthz, /readyz and /metrics."""

        def unready() -> str:
            wanted = frozenset(self._by_port)
            open_ = self.directory.synced.is_set() and self.doors is not None and wanted <= self.doors.open
            return "" if open_ and not self._leaving else "starting or leaving"

        host, port = self._settings.http_host or None, self._settings.http_port
        runner = await process.serve_health(host, port, sick=str, unready=unready)
        self.health_port = runner.addresses[0][1]
        return runner


async def _until_idle(handler: Handler, seconds: float) -> None:
    """Until nothing is under way, for so long at most; what was let in a moment ago counts, too."""
    deadline = time.monotonic() + seconds
    await asyncio.sleep(_LOOK_SECONDS)
    while handler.under_way and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """`stoker activator`: parse the settings and run."""
    try:
        settings = from_arguments(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        sys.stderr.write(f"stoker activator: {error}\n")
        return 2
    process.write_logs(settings.log_level)

    async def run(stop: asyncio.Event) -> int:
        cluster = await Cluster.connect(_API_REQUESTS)
        try:
            await Activator(cluster, settings).run(stop)
        finally:
            await cluster.close()
        return 0

    return process.until_signal(run)
