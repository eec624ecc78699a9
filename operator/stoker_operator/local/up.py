"""`stoker up -f service.yaml`: an InferenceService on this machine, without a cluster.

The operator's own reconcile (observe → plan → apply → report) runs against objects in memory; small stand-ins for the
controllers and the kubelet run the same manifests' containers as processes: the prefetch Job, the verifying init
container, the engine with its probes, restarts and drain. Each Service is a port on 127.0.0.1.

Invariants: no process outlives this one's orderly end; listens on loopback only.
Not here: limits of CPU and memory, NetworkPolicies, other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.local.controllers import Controllers
from stoker_operator.local.manifest import ManifestError, Manifests, load, runnable
from stoker_operator.local.process import LOOPBACK, Machine
from stoker_operator.local.proxy import Proxy
from stoker_operator.local.record import Record
from stoker_operator.local.report import Report
from stoker_operator.local.store import LocalCluster
from stoker_operator.manifests.identity import INSTANCE
from stoker_operator.manifests.workload import PORT
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings
from stoker_operator.spec.service import parse

DEFAULT_DATA = Path("~/.cache/stoker")
# How long a change waits for company, and how often progress is looked at.
_SETTLE_SECONDS = 0.05
_TICK_SECONDS = 0.5
_QUIET_TICK_SECONDS = 5.0
_KEEP_LOGS_SECONDS = 7 * 86400.0


def main(argv: list[str]) -> int:
    """Run `stoker up`: 0 after a drain, 1 when a service cannot become ready, 2 for a manifest that cannot be used."""
    options = _options(argv)
    try:
        manifests = load(options.file)
        runnable(manifests)
    except ManifestError as error:
        sys.stderr.write(f"stoker up: {error}\n")
        return 2
    data = options.data.expanduser().absolute()
    _forget_old_logs(data / "logs")
    return asyncio.run(Up(manifests, data, options.port, Report(), options.events).run())


@dataclass
class _Front:
    """One InferenceService: its object in the store and its port."""

    service: dict[str, Any]
    proxy: Proxy
    record: Record
    was_ready: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.proxy.host}:{self.proxy.port}/v1"


class Up:
    """Runs manifests until told to stop. The first service gets `port`, the next ones the ports after it."""

    def __init__(self, manifests: Manifests, data: Path, port: int, report: Report, events: bool) -> None:
        self._data = data
        self._report = report
        self._show_events = events
        self._store = LocalCluster()
        environment = dict(os.environ)
        machine = Machine({}, {}, manifests.secrets, manifests.config_maps, environment, (), data / "logs")
        self._controllers = Controllers(self._store, data, machine, gpus_of_this_machine())
        self._settings = Settings()
        self._fronts: list[_Front] = []
        for number, document in enumerate(manifests.services):
            service = self._store.add(document)
            self._controllers.take_claim(parse(service))
            self._controllers.take_claim(parse(service).as_canary)
            name = service["metadata"]["name"]
            proxy = Proxy(LOOPBACK, port + number, partial(self._backends, name))
            self._fronts.append(_Front(service, proxy, Record(data, name)))
        self._stop = asyncio.Event()
        self._failed = ""

    async def run(self) -> int:
        """Run; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            await self._work()
        except OSError as error:
            self._failed = f"{error.strerror or error}"
        finally:
            await self._end()
        if self._failed:
            sys.stderr.write(f"stoker up: {self._failed}\n")
            return 1
        return 0

    async def _work(self) -> None:
        """Reconcile and look after the processes until told to stop or until nothing can help."""
        reconciler = Reconciler(self._store, PodClient(self._settings.pod_timeout_seconds), self._settings)
        while not self._stop.is_set() and not self._failed:
            self._controllers.sync()
            for front in self._fronts:
                meta = front.service["metadata"]
                await reconciler.reconcile(meta["namespace"], meta["name"])
                await self._look(front)
            self._drain_events()
            for front in self._fronts:
                front.record.write(front.service, front.url, self._pods(front.service["metadata"]["name"]))
            quiet = all(front.was_ready for front in self._fronts)
            await self._store.changed(_QUIET_TICK_SECONDS if quiet else _TICK_SECONDS)
            await asyncio.sleep(_SETTLE_SECONDS)

    async def _look(self, front: _Front) -> None:
        """Open the port when a pod is ready, and show where the service stands."""
        if self._backends(front.service["metadata"]["name"]):
            try:
                await front.proxy.start()
            except OSError as error:
                where = f"{front.proxy.host}:{front.proxy.port}"
                self._failed = f"{where} cannot be used ({error.strerror}); choose another with --port."
                return
        ready = self._report.show(front.service, front.url)
        if ready and not front.was_ready:
            front.was_ready = True
            self._report.say(f"{front.service['metadata']['name']}  Ready in {self._report.seconds:.1f} s  {front.url}")
        if not front.was_ready:
            self._failed = self._hopeless(front.service)

    def _hopeless(self, service: Mapping[str, Any]) -> str:
        """Why the service cannot become ready before a person changes something; "" while it may."""
        conditions = {item["type"]: item for item in service.get("status", {}).get("conditions", ())}
        stalled = conditions.get("Stalled", {})
        if stalled.get("status") != "True":
            return ""
        name = service["metadata"]["name"]
        tails = [pod.log_tail for pod in self._controllers.pods.values() if pod.log_tail]
        if stalled["reason"] == "CrashLoop" and tails:
            return f"{name} does not start. Its last words (the whole log is in {self._data / 'logs'}):\n{tails[-1]}"
        return f"{name}: {stalled['reason']}: {stalled['message']}"

    async def _end(self) -> None:
        """Drain: no new connections, running streams finish, then the processes end."""
        for front in self._fronts:
            front.proxy.refuse()
        if self._store.of(kinds.POD):
            self._report.say("Draining: running requests finish. Ctrl-C again ends them.")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._controllers.kill)
        await self._controllers.shut_down()
        for front in self._fronts:
            await front.proxy.stop()
            front.record.remove()
        self._report.say("Stopped.")

    def _signalled(self) -> None:
        self._stop.set()
        self._store.touch()

    def _backends(self, name: str) -> list[tuple[str, int]]:
        """Addresses of the ready pods that its Service selects: a canary's among them, while it has a share."""
        fronts = (item for item in self._store.of(kinds.SERVICE) if item["metadata"]["name"] == name)
        wanted: dict[str, str] = next((front["spec"]["selector"] for front in fronts), {INSTANCE: name})
        pods = self._controllers.pods.values()
        mine = [pod for pod in pods if wanted.items() <= pod.object["metadata"]["labels"].items()]
        return [address for pod in mine if (address := pod.address(PORT)) is not None]

    def _pods(self, name: str) -> list[dict[str, Any]]:
        """The service's pods, the prefetch's among them."""
        return [pod for pod in self._store.of(kinds.POD) if pod["metadata"]["labels"].get(INSTANCE) == name]

    def _drain_events(self) -> None:
        while not self._store.events.empty():
            event = self._store.events.get_nowait()
            for front in self._fronts:
                if front.service["metadata"]["name"] == event["involvedObject"]["name"]:
                    front.record.note(event)
            if self._show_events:
                self._report.say(
                    f"{event['involvedObject']['name']}  {event['type']} {event['reason']}: {event['message']}"
                )


def gpus_of_this_machine() -> frozenset[int]:
    """Indices of the NVIDIA GPUs that the driver shows, without loading it."""
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return frozenset(int(match[1]) for match in names if match)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stoker up",
        description="Run InferenceServices on this machine: the same manifests as in a cluster, as processes. "
        "HF_TOKEN and HF_ENDPOINT of the environment are used where the manifest does not say otherwise.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-f", "--file", type=Path, action="append", required=True, metavar="FILE", help="a manifest; may be repeated")
    add("--port", type=int, default=PORT, help="port of the first service, on 127.0.0.1 (default: %(default)s)")
    add("--data", type=Path, default=DEFAULT_DATA, help="folder of volumes and logs (default: %(default)s)")
    add("--events", action="store_true", help="show every event, as `kubectl get events` would")
    options = parser.parse_args(argv)
    if not 1 <= options.port <= 65535:
        parser.error(f"--port is {options.port}; it must be between 1 and 65535")
    return options


def _forget_old_logs(logs: Path) -> None:
    now = time.time()
    for folder in logs.glob("*"):
        if now - folder.stat().st_mtime > _KEEP_LOGS_SECONDS:
            shutil.rmtree(folder)
