"""How the operator does with many InferenceServices: `python -m e2e.scale --services 1000`.

A real kube-apiserver with the real controllers and the real scheduler; kwok plays the nodes and the pods' kubelets
(simulation.py), so that volumes are bound, prefetches end with a report and engines become ready.

    from nothing       N services are created; until each has answered a completion and is Ready
    after a restart    the operator starts anew; until it has looked at every service
    a change           of N/10 services is rolled out; until each is Ready again

Invariants: all processes end with this one.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.cluster import apiserver
from e2e.scale.control_plane import control_plane
from e2e.scale.operator_process import NOTHING, Operator, Sample, cpu_seconds
from e2e.scale.services import QUIET_SECONDS, change, create, differing, settled, still, versions
from e2e.scale.simulation import NODES, STORAGE_CLASS, answer_for_pods, furnish, simulate

from stoker_operator.cluster.api import Cluster

_HEAD = (
    "| phase | seconds | reconciles | reads each | writes each | CPU s | CPU ms each | RSS MiB | API server CPU s "
    "| objects written |\n|---|---|---|---|---|---|---|---|---|---|"
)
CONTROLLERS = (
    "deployment-controller", "replicaset-controller", "job-controller", "garbage-collector-controller",
    "persistentvolume-binder-controller", "persistentvolumeclaim-protection-controller", "disruption-controller",
    "endpointslice-controller", "horizontal-pod-autoscaler-controller",
)  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """How long it took, and where the counters stood before and after."""

    seconds: float
    before: Sample
    after: Sample

    def row(self, name: str, written: int) -> str:
        """Its line of the table."""
        before, now = self.before, self.after
        reconciles = max(now.reconciles - before.reconciles, 1)
        reads, writes, cpu = now.reads - before.reads, now.writes - before.writes, now.cpu - before.cpu
        cells = [name, f"{self.seconds:.0f}", f"{reconciles:.0f}", f"{reads / reconciles:.1f}"]
        cells += [f"{writes / reconciles:.2f}", f"{cpu:.1f}", f"{1000 * cpu / reconciles:.1f}", f"{now.memory:.0f}"]
        return f"| {' | '.join(cells)} | {now.server - before.server:.0f} | {written} |"


class Measurement:
    """The operator under measurement, started anew for a phase; the control plane and the services stay."""

    def __init__(self, running: apiserver.Running, cluster: Cluster, log: Path, count: int, limit: float) -> None:
        server = running.processes.get("kube-apiserver")
        self._server = server.pid if server is not None else 0
        self._running, self._cluster, self._log = running, cluster, log
        self._count, self._limit = count, limit
        self._operator: Operator | None = None
        self._last = NOTHING

    def start(self) -> None:
        """Start the operator, anew if it runs; its counters begin at 0, the API server's go on."""
        self.stop()
        self._last = replace(NOTHING, server=cpu_seconds(self._server))
        self._operator = Operator(self._running.kubeconfig, self._log, STORAGE_CLASS, self._server)

    def stop(self) -> None:
        """End the operator."""
        if self._operator is not None:
            self._operator.stop()

    async def settle(self, reconciles: int) -> Phase:
        """Wait until all is done and quiet, after at least so many reconciles."""
        before = self._last
        seconds, self._last = await self._quiet(before.reconciles + reconciles)
        return Phase(seconds, before, self._last)

    async def _quiet(self, least: float) -> tuple[float, Sample]:
        """(seconds, counters) when it became quiet; the quiet itself is not counted."""
        assert self._operator is not None
        started = time.monotonic()
        last, since = None, started
        while time.monotonic() - started < self._limit:
            await asyncio.sleep(0.5)
            if self._operator.process.poll() is not None:
                raise SystemExit("the operator ended; see its log")
            sample = await asyncio.to_thread(self._operator.sample)
            if sample is None:
                continue
            if last is None or (sample.reconciles, sample.writes) != (last.reconciles, last.writes):
                last, since = sample, time.monotonic()
                continue
            quiet = time.monotonic() - since > QUIET_SECONDS and sample.reconciles >= least
            if quiet and await settled(self._cluster, self._count):
                return since - started, sample
        raise SystemExit(f"not settled within {self._limit:.0f} s: {last}")


async def measure(running: apiserver.Running, folder: Path, count: int, limit: float) -> None:
    """Go through the phases and print the table."""
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    cluster = await Cluster.connect()
    pods = await answer_for_pods()
    measured = Measurement(running, cluster, folder / "operator.log", count, limit)
    try:
        await furnish(cluster, count)
        simulate(running, folder)
        print(f"{count} services, {NODES} nodes, {os.cpu_count()} CPUs\n{_HEAD}", flush=True)
        measured.start()
        await create(cluster, count)
        phase = await measured.settle(count)
        made = await still(cluster)
        print(phase.row("from nothing", len(made)), flush=True)
        measured.start()
        phase = await measured.settle(count)
        seen = await versions(cluster)
        print(phase.row("after a restart", differing(made, seen)), flush=True)
        await change(cluster, max(count // 10, 1))
        phase = await measured.settle(count // 10)
        print(phase.row("a change of a tenth", differing(seen, await versions(cluster))), flush=True)
    finally:
        measured.stop()
        await pods.cleanup()
        await cluster.close()


def main() -> int:
    """Start a control plane, measure, stop it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=200, help="how many InferenceServices (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="for one phase (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep state and logs in this folder")
    options = parser.parse_args()
    with control_plane(CONTROLLERS, options.keep) as (running, folder):
        asyncio.run(measure(running, folder, options.services, options.limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
