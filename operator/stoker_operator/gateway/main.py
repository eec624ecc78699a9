"""The gateway's process: settings → what the cluster serves → what Envoy follows. `stoker gateway`.

Envoy runs beside it, in a container of its own, and has every request; this process tells it where they go.
Invariants: it is ready once Envoy has been told of all services; without it Envoy goes on with what it was told last.
After SIGTERM requests are taken for as long as anybody may still be led here, and those under way end; only then does
this process end, and the kubelet ends Envoy after it.
Exit status: 0 after a signal, 1 where keys cannot be read, 2 for a bad setting.
Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from stoker_operator import metrics, process
from stoker_operator.cluster.api import Cluster
from stoker_operator.gateway import envoy
from stoker_operator.gateway.admin import Admin
from stoker_operator.gateway.directory import Directory
from stoker_operator.gateway.files import Files
from stoker_operator.gateway.keys import Keys, KeysError
from stoker_operator.gateway.models import Table, make_table
from stoker_operator.gateway.routes import route_configuration
from stoker_operator.gateway.settings import GatewaySettings, from_arguments
from stoker_operator.settings import SettingsError

log = logging.getLogger("stoker.gateway")
_API_REQUESTS = 4
# Changes that come together are told together; keys are read again so often.
_TOGETHER_SECONDS, _LOOK_SECONDS = 0.05, 2.0


class Gateway:
    """One replica's teller. `run` it until `stop` is set. Raises KeysError where there are none to read."""

    def __init__(self, cluster: Cluster, settings: GatewaySettings) -> None:
        self._settings = settings
        self._files = Files(Path(settings.folder))
        self._keys = Keys(settings.keys_file) if settings.keys_file else None
        self._admin = Admin(settings.admin_port)
        self._told = False
        self._leaving = False
        self._shadowed: frozenset[tuple[str, str]] = frozenset()
        self.directory = Directory(cluster, settings.namespaces)
        self.health_port = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the cluster; the caller closes it."""
        if self._keys is not None:
            self._keys.read()
        prepare(self._settings, self._files)
        health = await self._serve_health()
        try:
            await process.work_until(stop, self.directory.run(), self._tell(), leave=self._leave)
        finally:
            await health.cleanup()

    async def _tell(self) -> None:
        """Tell Envoy whatever changes, until cancelled."""
        await self.directory.synced.wait()
        while True:
            self.directory.changed.clear()
            self._write(make_table(self.directory.backends()))
            self._told = True
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self.directory.changed.wait()
                await asyncio.sleep(_TOGETHER_SECONDS)
            except TimeoutError:
                continue

    def _write(self, table: Table) -> None:
        """Where pods are, then the services, then the routes to them; what is left over goes last."""
        for backend in table.backends:
            self._files.write(envoy.endpoints_file(backend.cluster), envoy.endpoint_document(backend))
        keys = self._keys.read() if self._keys is not None else None
        self._files.write(envoy.CLUSTERS, envoy.cluster_document(table.backends, self._settings))
        if self._files.write(envoy.ROUTE_FILE, envoy.route_document(route_configuration(table, keys))):
            log.info("%d models of %d services", len(table.models), len(table.backends))
        self._files.write(envoy.LISTENERS, envoy.listener_document(self._settings))
        wanted = {envoy.endpoints_file(backend.cluster) for backend in table.backends}
        for name in self._files.names - wanted - {envoy.START, envoy.LISTENERS, envoy.ROUTE_FILE, envoy.CLUSTERS}:
            self._files.forget(name)
        metrics.GATEWAY_MODELS.set(len(table.models))
        metrics.GATEWAY_SHADOWED.set(len(table.shadowed))
        shadowed = frozenset((name, backend.cluster) for name, backend in table.shadowed)
        for name, cluster in sorted(shadowed - self._shadowed):
            log.warning("model %s of %s is not reached: %s has served it for longer", name, cluster, table.models[name])
        self._shadowed = shadowed

    async def _leave(self) -> None:
        self._leaving = True
        await asyncio.sleep(self._settings.leave_seconds)
        await self._admin.drain()
        deadline = time.monotonic() + self._settings.drain_seconds
        while await self._admin.active() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS / 4)

    async def _serve_health(self) -> web.AppRunner:
        def unready() -> str:
            return "" if self._told and not self._leaving else "starting or leaving"

        host, port = self._settings.host or None, self._settings.http_port
        runner = await process.serve_health(host, port, sick=str, unready=unready)
        self.health_port = runner.addresses[0][1]
        return runner


def prepare(settings: GatewaySettings, files: Files) -> None:
    """Write what Envoy needs to start. It listens to nobody before it is told of routes."""
    files.write(envoy.START, envoy.start_document(settings))
    for name in {envoy.LISTENERS, envoy.CLUSTERS} - files.names:
        files.write(name, envoy.NOTHING)


def main(argv: Sequence[str] | None = None) -> int:
    """`stoker gateway`: parse the settings and run."""
    try:
        settings = from_arguments(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        sys.stderr.write(f"stoker gateway: {error}\n")
        return 2
    process.write_logs(settings.log_level)
    if settings.prepare:
        prepare(settings, Files(Path(settings.folder)))
        return 0

    async def run(stop: asyncio.Event) -> int:
        cluster = await Cluster.connect(_API_REQUESTS)
        try:
            await Gateway(cluster, settings).run(stop)
        finally:
            await cluster.close()
        return 0

    try:
        return process.until_signal(run)
    except KeysError as error:
        log.error("%s", error)
        return 1
