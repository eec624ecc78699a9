"""The operator that is measured: its process, and its counters as its own /metrics and the kernel tell them.

Invariants: the process has the settings of the chart, but for the resync, which may be made never to fall into a
measurement.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import apiserver
from prometheus_client.parser import text_string_to_metric_families

_WRITES = ("PATCH", "POST", "PUT", "DELETE")


@dataclass(frozen=True)
class Sample:
    """The operator's counters at one moment. CPU in seconds, memory in MiB; `server` is the API server's CPU,
    `durations` are the reconciles by the seconds that they took at most.
    """

    reconciles: float
    reads: float
    writes: float
    cpu: float
    memory: float
    waiting: float
    server: float
    leads: bool = False
    filled: bool = False
    durations: Mapping[float, float] = field(default_factory=dict)

    def quantile(self, share: float, before: Sample) -> float:
        """So many seconds a reconcile since `before` took at most, in this share of them; between two bounds of the
        histogram as Prometheus has it. 0 of none.
        """
        counted = [(bound, count - before.durations.get(bound, 0.0)) for bound, count in sorted(self.durations.items())]
        wanted = share * counted[-1][1] if counted else 0.0
        below, under = 0.0, 0.0
        for bound, count in counted:
            if count >= wanted and count > under:
                return bound if bound == float("inf") else below + (bound - below) * (wanted - under) / (count - under)
            below, under = bound, count
        return 0.0


NOTHING = Sample(0, 0, 0, 0, 0, 0, 0)


class Operator:
    """One operator process. `server` is the API server's pid, 0 where it runs elsewhere; `resync` and `lease` are in
    seconds: a machine that does much else renews late. `identity` tells two of one machine apart.
    """

    def __init__(
        self, kubeconfig: Path, log: Path, storage_class: str, server: int, resync: int = 3600, lease: int = 15,
        identity: str = "",
    ) -> None:  # fmt: skip
        self._server = server
        (self.port,) = apiserver.free_ports(1)
        command = [sys.executable, "-m", "stoker_operator", f"--http-port={self.port}", "--http-host=127.0.0.1"]
        command += [f"--lease-seconds={lease}", f"--resync-seconds={resync}", "--log-level=warning"]
        command += [f"--cache-storage-class={storage_class}", *([f"--identity={identity}"] if identity else [])]
        with log.open("ab") as stream:
            environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
            self.process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)

    def sample(self) -> Sample | None:
        """What the process says of itself; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
                page = answer.read().decode()
        except OSError:
            return None
        found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

        def total(name: str, verbs: Sequence[str] = ()) -> float:
            return sum(
                s.value
                for s in found
                if s.name == name and (not verbs or s.labels["verb"] in verbs) and s.labels.get("kind") != "Lease"
            )

        return Sample(
            total("stoker_reconciles_total"),
            total("stoker_api_requests_total", ("GET",)),
            total("stoker_api_requests_total", _WRITES),
            total("process_cpu_seconds_total"),
            total("process_resident_memory_bytes") / 2**20,
            total("stoker_queue_length"),
            cpu_seconds(self._server),
            bool(total("stoker_leader")),
            bool(total("stoker_filled")),
            {float(s.labels["le"]): s.value for s in found if s.name == "stoker_reconcile_seconds_bucket"},
        )

    def peak(self) -> float:
        """The most memory that the process has had, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def stop(self) -> None:
        """End the process."""
        apiserver.end(self.process)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 when it is not one of this machine's."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def sampled(operator: Operator) -> Sample:
    """Its counters, once it answers. Raises SystemExit when it ended."""
    while True:
        if operator.process.poll() is not None:
            raise SystemExit("the operator ended; see its log")
        found = await asyncio.to_thread(operator.sample)
        if found is not None:
            return found
        await asyncio.sleep(0.5)
