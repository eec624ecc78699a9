"""How the operator does with many InferenceServices: `python -m e2e.scale --services 1000`.

A real kube-apiserver with the real controllers and the real scheduler; kwok plays the nodes and the pods' kubelets
(simulation.py), so that volumes are bound, prefetches end with a report and engines become ready.

    from nothing       N services are created; until each has answered a completion and is Ready
    after a restart    the operator starts anew; until it has looked at every service
    changes            --rate services a second are changed; how long reconciles took, and changes until they were seen
    a leader lost      the leader is killed while they are; until a second operator has taken a change up
    a rollout          of N/10 services; until each is Ready again

With --keep FOLDER the services stay there, and another run begins with them.

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
from e2e.scale.changes import Changes, change_steadily, followed
from e2e.scale.control_plane import control_plane
from e2e.scale.operator_process import NOTHING, Operator, Sample, cpu_seconds, sampled
from e2e.scale.services import QUIET_SECONDS, change, count_services, create, differing, settled, still, versions
from e2e.scale.simulation import NODES, STORAGE_CLASS, answer_for_pods, furnish, simulate

from stoker_operator.cluster.api import Cluster

_HEAD = (
    "| phase | seconds | reconciles | reads each | writes each | CPU s | CPU ms each | RSS MiB | API server CPU s "
    "| objects written |\n|---|---|---|---|---|---|---|---|---|---|"
)
# Not the EndpointSlices': the API server refuses each for the pods' address, which is one of loopback, and it would be
# asked for them again and again.
CONTROLLERS = (
    "deployment-controller", "replicaset-controller", "job-controller", "garbage-collector-controller",
    "persistentvolume-binder-controller", "persistentvolumeclaim-protection-controller", "disruption-controller",
    "horizontal-pod-autoscaler-controller",
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


@dataclass(frozen=True)
class Options:
    """What is asked for: services, pods of each, seconds that a phase may take, changes a second and for how long."""

    services: int
    pods: int
    limit: float
    rate: float
    seconds: float


class Measurement:
    """The operator under measurement, started anew for a phase; the control plane and the services stay."""

    def __init__(self, running: apiserver.Running, cluster: Cluster, log: Path, options: Options) -> None:
        server = running.processes.get("kube-apiserver")
        self._server = server.pid if server is not None else 0
        self._running, self._cluster, self._log, self._options = running, cluster, log, options
        self._operator: Operator | None = None
        self._last = NOTHING

    def start(self) -> None:
        """Start the operator, anew if it runs; its counters begin at 0, the API server's go on."""
        self.stop()
        self._last = replace(NOTHING, server=cpu_seconds(self._server))
        self._operator = self._another("first")

    def stop(self) -> None:
        """End the operator."""
        if self._operator is not None:
            self._operator.stop()

    async def settle(self, reconciles: int) -> Phase:
        """Wait until all is done and quiet, after at least so many reconciles."""
        before = self._last
        seconds, self._last = await self._quiet(before.reconciles + reconciles)
        return Phase(seconds, before, self._last)

    async def steadily(self) -> str:
        """Change services at the rate that is asked for; what came of it."""
        assert self._operator is not None
        before, computed = await sampled(self._operator), self._computed()
        started = time.monotonic()
        async with followed(self._cluster) as changes:
            await change_steadily(self._cluster, changes, *self._steps)
            written = time.monotonic() - started
            await _taken_up(changes, self._options.limit)
        seconds = time.monotonic() - started
        self._last = await sampled(self._operator)
        used = {name: (now - computed[name]) / seconds for name, now in self._computed().items()}
        parts = [f"{len(changes.took)} changes, {len(changes.took) / written:.1f} a second"]
        parts += [
            f"reconciles p50 {self._last.quantile(0.5, before):.2f} s, p99 {self._last.quantile(0.99, before):.2f} s"
        ]
        parts += [f"a change was taken up after p50 {changes.quantile(0.5):.1f} s, p99 {changes.quantile(0.99):.1f} s"]
        parts += [
            f"all after {seconds:.0f} s",
            f"{(self._last.reconciles - before.reconciles) / seconds:.1f} reconciles a second",
        ]
        cores = ", ".join(f"{name} {share:.2f}" for name, share in sorted(used.items()) if share >= 0.01)
        return f"{'; '.join(parts)}; cores used: {cores}; operator's peak {self._operator.peak():.0f} MiB"

    async def lose_the_leader(self) -> str:
        """Kill the leader while services change, with a second operator waiting; what came of it."""
        assert self._operator is not None
        there = set(await versions(self._cluster, events=False))
        second = self._another("second")
        try:
            # As one that has been there for a while.
            while not (await sampled(second)).filled:
                await asyncio.sleep(0.5)
            async with followed(self._cluster) as changes:
                changing = asyncio.create_task(change_steadily(self._cluster, changes, *self._steps))
                while not changes.took:
                    await asyncio.sleep(0.1)
                self._operator.process.kill()
                lost = time.monotonic()
                while not (await sampled(second)).leads:
                    await asyncio.sleep(0.1)
                led, taken = time.monotonic() - lost, len(changes.took)
                while len(changes.took) == taken:
                    await asyncio.sleep(0.05)
                acted = time.monotonic() - lost
                await changing
                await _taken_up(changes, self._options.limit)
            self._last = await sampled(second)  # its counters began at 0
        finally:
            self._operator.process.wait()
            self._operator = second
        made = there ^ set(await versions(self._cluster, events=False))
        return (
            f"a second operator led after {led:.1f} s, acted after {acted:.1f} s; {len(made)} objects made or deleted"
        )

    @property
    def _steps(self) -> tuple[int, float, float]:
        return self._options.services, self._options.rate, self._options.seconds

    def _another(self, identity: str) -> Operator:
        return Operator(self._running.kubeconfig, self._log, STORAGE_CLASS, self._server, identity=identity)

    def _computed(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        operator = {"operator": self._operator.process} if self._operator is not None else {}
        processes = {**self._running.processes, **operator}
        return {name: cpu_seconds(process.pid) for name, process in processes.items()} | {"this": time.process_time()}

    async def _quiet(self, least: float) -> tuple[float, Sample]:
        """(seconds, counters) when it became quiet; the quiet itself is not counted."""
        assert self._operator is not None
        started = time.monotonic()
        last, since = None, started
        while time.monotonic() - started < self._options.limit:
            await asyncio.sleep(0.5)
            sample = await sampled(self._operator)
            if last is None or (sample.reconciles, sample.writes) != (last.reconciles, last.writes):
                last, since = sample, time.monotonic()
                continue
            quiet = time.monotonic() - since > QUIET_SECONDS and sample.reconciles >= least
            if quiet and await settled(self._cluster, self._options.services):
                return since - started, sample
        raise SystemExit(f"not settled within {self._options.limit:.0f} s: {last}")


async def _taken_up(changes: Changes, limit: float) -> None:
    """Wait until every change was taken up."""
    end = time.monotonic() + limit
    while changes.asked:
        if time.monotonic() > end:
            raise SystemExit(f"{len(changes.asked)} changes were not taken up within {limit:.0f} s")
        await asyncio.sleep(0.1)


async def measure(running: apiserver.Running, folder: Path, options: Options) -> None:
    """Go through the phases and print what came of them."""
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    cluster = await Cluster.connect()
    pods = await answer_for_pods()
    measured = Measurement(running, cluster, folder / "operator.log", options)
    count = options.services
    try:
        await furnish(cluster, count)
        simulate(running, folder)
        print(f"{count} services of {options.pods} pods, {NODES} nodes, {os.cpu_count()} CPUs\n{_HEAD}", flush=True)
        measured.start()
        if not await count_services(cluster):
            await create(cluster, count, options.pods)
            phase = await measured.settle(count)
            print(phase.row("from nothing", len(await still(cluster))), flush=True)
        else:
            await measured.settle(count)
        made = await still(cluster)
        measured.start()
        phase = await measured.settle(count)
        seen = await versions(cluster)
        print(phase.row("after a restart", differing(made, seen)), flush=True)
        if options.rate:
            print(await measured.steadily(), flush=True)
            print(await measured.lose_the_leader(), flush=True)
            await measured.settle(0)
            seen = await still(cluster)
        await change(cluster, max(count // 10, 1))
        phase = await measured.settle(count // 10)
        print(phase.row("a rollout of a tenth", differing(seen, await versions(cluster))), flush=True)
    finally:
        measured.stop()
        await pods.cleanup()
        await cluster.close()


def main() -> int:
    """Start a control plane, measure, stop it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=200, help="how many InferenceServices (default: %(default)s)")
    parser.add_argument("--pods", type=int, default=1, help="of each service (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="for one phase (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=0, help="changes a second; 0 leaves them out (default)")
    parser.add_argument("--seconds", type=float, default=20, help="for so long (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep state and logs in this folder")
    given = parser.parse_args()
    options = Options(given.services, given.pods, given.limit, given.rate, given.seconds)
    with control_plane(CONTROLLERS, given.keep) as (running, folder):
        asyncio.run(measure(running, folder, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
