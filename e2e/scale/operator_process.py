"""The operator that is measured: its process, and its counters as its own /metrics and the kernel tell them.

Invariants: the process has the settings of the chart, but for the resync, which may be made never to fall into a
measurement.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import apiserver
from prometheus_client.parser import text_string_to_metric_families

_WRITES = ("PATCH", "POST", "PUT", "DELETE")


@dataclass(frozen=True)
class Sample:
    """The operator's counters at one moment. CPU in seconds, memory in MiB; `server` is the API server's CPU."""

    reconciles: float
    reads: float
    writes: float
    cpu: float
    memory: float
    waiting: float
    server: float


NOTHING = Sample(0, 0, 0, 0, 0, 0, 0)


class Operator:
    """One operator process. `server` is the API server's pid, 0 where it runs elsewhere; `resync` and `lease` are in
    seconds: a machine that does much else renews late.
    """

    def __init__(
        self, kubeconfig: Path, log: Path, storage_class: str, server: int, resync: int = 3600, lease: int = 15
    ) -> None:
        self._server = server
        (self.port,) = apiserver.free_ports(1)
        command = [sys.executable, "-m", "stoker_operator", f"--http-port={self.port}", "--http-host=127.0.0.1"]
        command += [f"--lease-seconds={lease}", f"--resync-seconds={resync}", "--log-level=warning"]
        command += [f"--cache-storage-class={storage_class}"]
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
        )

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
