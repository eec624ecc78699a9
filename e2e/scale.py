"""How the operator does with many InferenceServices on a real kube-apiserver: `python -m e2e.scale --services 200`.

Makes that many services, suspended, since no kubelet is there to run pods; what their prefetches would report is
written by this script. Starts the operator as a process and prints how long it takes to converge, how many requests a
reconcile costs and how much CPU and memory the process used; then the same after a restart, when nothing is to be
written.

Invariants: all numbers come from the operator's own /metrics and from the kernel's account of the process.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import apiserver
from e2e.cluster.binaries import ensure
from prometheus_client.parser import text_string_to_metric_families

from stoker_operator.cluster import INFERENCE_SERVICE, POD, Cluster

ROOT = Path(__file__).resolve().parents[1]
CONTROLLERS = ("deployment-controller", "replicaset-controller", "job-controller", "garbage-collector-controller")
NAMESPACES = 10
REPORT = {
    "resolvedRevision": "c0ffee0123456789",
    "digest": "sha256:" + "ab" * 32,
    "bytes": 98362432,
    "path": "sha256-abab",
    "serve": "sha256-abab/m.gguf",
}
WRITES = ("PATCH", "POST", "PUT", "DELETE")
QUIET_SECONDS = 5.0


@dataclass(frozen=True)
class Sample:
    """The operator's counters at one moment. CPU in seconds, memory in MiB."""

    reconciles: float
    reads: float
    writes: float
    cpu: float
    memory: float
    waiting: float


class Operator:
    """One operator process."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        (self.port,) = apiserver.free_ports(1)
        command = [sys.executable, "-m", "stoker_operator", f"--http-port={self.port}", "--http-host=127.0.0.1"]
        command += ["--lease-seconds=3", "--resync-seconds=3600", "--workers=8", "--reconciles-per-second=500"]
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

        def total(name: str, verbs: tuple[str, ...] = ()) -> float:
            return sum(
                s.value
                for s in found
                if s.name == name and (not verbs or s.labels["verb"] in verbs) and s.labels.get("kind") != "Lease"
            )

        return Sample(
            total("stoker_reconciles_total"),
            total("stoker_api_requests_total", ("GET",)),
            total("stoker_api_requests_total", WRITES),
            total("process_cpu_seconds_total"),
            total("process_resident_memory_bytes") / 2**20,
            total("stoker_queue_length"),
        )

    def stop(self) -> None:
        """End the process."""
        apiserver.end(self.process)


async def wait_quiet(operator: Operator, done: Callable[[], Awaitable[bool]]) -> tuple[float, Sample]:
    """(seconds, counters) until `done` is true and nothing was written for a while."""
    started = time.monotonic()
    last, since = None, started
    while True:
        await asyncio.sleep(0.5)
        if operator.process.poll() is not None:
            raise SystemExit("the operator ended; see its log")
        sample = await asyncio.to_thread(operator.sample)
        if sample is None:
            continue
        if last is None or (sample.writes, sample.waiting) != (last.writes, last.waiting) or not await done():
            last, since = sample, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS:
            return since - started, sample


async def create(cluster: Cluster, count: int) -> None:
    """Make the services, spread over a few namespaces."""

    async def one(number: int) -> None:
        await cluster.create(
            INFERENCE_SERVICE,
            {
                "apiVersion": INFERENCE_SERVICE.api_version,
                "kind": INFERENCE_SERVICE.kind,
                "metadata": {"name": f"service-{number}", "namespace": f"scale-{number % NAMESPACES}"},
                "spec": {"suspend": True, "model": {"uri": f"hf://org/model-{number}"}, "resources": {"gpus": 0}},
            },
        )

    await asyncio.gather(*(one(number) for number in range(count)))


async def publish(cluster: Cluster) -> None:
    """The kubelet's part: every prefetch that was started has ended well."""
    ended = {"exitCode": 0, "message": json.dumps(REPORT), "finishedAt": "2026-01-01T00:00:00Z"}
    container = {"name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Succeeded", "containerStatuses": [container | {"state": {"terminated": ended}}]}
    pods = await cluster.list_all(POD, "", "app.kubernetes.io/component=fetch")
    fresh = [pod["metadata"] for pod in pods if pod["status"].get("phase") != "Succeeded"]
    head = {"apiVersion": POD.api_version, "kind": POD.kind, "status": status}
    manifests = [head | {"metadata": {"name": meta["name"], "namespace": meta["namespace"]}} for meta in fresh]
    await asyncio.gather(*(cluster.apply(POD, manifest, subresource="status") for manifest in manifests))


def row(name: str, services: int, seconds: float, sample: Sample) -> str:
    """One line of the table."""
    reconciles = max(sample.reconciles, 1)
    cells = [name, services, f"{seconds:.1f}", f"{sample.reconciles:.0f}", f"{sample.reads / reconciles:.1f}"]
    cells += [f"{sample.writes:.0f}", f"{sample.cpu:.1f}", f"{1000 * sample.cpu / reconciles:.1f}"]
    return f"| {' | '.join(map(str, cells))} | {sample.memory:.0f} |"


async def measure(kubeconfig: Path, folder: Path, count: int) -> None:
    """Converge from nothing, then after a restart, and print the table."""
    os.environ["KUBECONFIG"] = str(kubeconfig)
    cluster = await Cluster.connect()
    log = folder / "operator.log"

    async def converged() -> bool:
        """Whether every service is as far as it can be."""
        await publish(cluster)
        services = await cluster.list_all(INFERENCE_SERVICE, "")
        conditions = [item.get("status", {}).get("conditions", ()) for item in services]
        reasons = [item["reason"] for items in conditions for item in items if item["type"] == "Ready"]
        return reasons == ["Suspended"] * count

    print("| phase | services | seconds | reconciles | reads/reconcile | writes | CPU s | CPU ms/reconcile | RSS MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    await create(cluster, count)
    operator = Operator(kubeconfig, log)
    try:
        seconds, sample = await wait_quiet(operator, converged)
        print(row("from nothing", count, seconds, sample))
        operator.stop()
        operator = Operator(kubeconfig, log)
        seconds, sample = await wait_quiet(operator, converged)
        print(row("after a restart", count, seconds, sample))
    finally:
        operator.stop()
        await cluster.close()


def main() -> int:
    """Start a control plane, measure, stop it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=200, help="how many InferenceServices (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = apiserver.start(folder / "control-plane", controllers=CONTROLLERS)
        try:
            kubectl = str(ensure(["kubectl"])["kubectl"])
            environment = os.environ | {"KUBECONFIG": str(running.kubeconfig)}

            def run(*arguments: str) -> None:
                subprocess.run([kubectl, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)

            run("apply", "-f", str(ROOT / "crds" / "stoker.dev_inferenceservices.yaml"))
            run("wait", "--for=condition=Established", "crd/inferenceservices.stoker.dev")
            for number in range(NAMESPACES):
                run("create", "namespace", f"scale-{number}")
            asyncio.run(measure(running.kubeconfig, folder, options.services))
        finally:
            running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
