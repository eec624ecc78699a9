"""How the operator does with many InferenceServices: `python -m e2e.scale --services 1000`.

A real kube-apiserver with the real controllers and the real scheduler; kwok plays the nodes and the pods' kubelets, so
that volumes are bound, prefetches end with a report and engines become ready. The pods' address is one of loopback, on
which this script answers for every engine and every prefetch: the operator's completions and polls are real requests.

    from nothing       N services are created; until each has answered a completion and is Ready
    after a restart    the operator starts anew; until it has looked at every service
    a change           of N/10 services is rolled out; until each is Ready again

Invariants: the operator's numbers come from its /metrics and from the kernel; that nothing was written is read off the
resourceVersions of every object, Leases apart; all processes end with this one.
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from e2e.cluster import apiserver
from e2e.cluster.binaries import ensure
from prometheus_client.parser import text_string_to_metric_families

from stoker_operator import cluster as kinds
from stoker_operator.cluster import Cluster, Kind
from stoker_operator.manifests.cache import PROGRESS_PORT
from stoker_operator.manifests.workload import PORT

ROOT = Path(__file__).resolve().parents[1]
CONTROLLERS = (
    "deployment-controller", "replicaset-controller", "job-controller", "garbage-collector-controller",
    "persistentvolume-binder-controller", "persistentvolumeclaim-protection-controller", "disruption-controller",
    "endpointslice-controller", "horizontal-pod-autoscaler-controller",
)  # fmt: skip
NAMESPACES, NODES = 20, 20
POD_ADDRESS = "127.77.0.1"
STORAGE_CLASS = "simulated"
REPORT = {
    "resolvedRevision": "c0ffee0123456789c0ffee0123456789c0ffee01",
    "digest": "sha256:" + "ab" * 32,
    "bytes": 98362432,
    "path": "sha256-abab",
    "serve": "sha256-abab",
    "shape": {"layers": 30, "kvHeads": 3, "headDim": 64, "maxContext": 8192},
}
WRITES = ("PATCH", "POST", "PUT", "DELETE")
WRITTEN = (
    kinds.INFERENCE_SERVICE, kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.CLAIM, kinds.POD, kinds.EVENT,
    kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.CONTROLLER_REVISION, kinds.JOB, kinds.DISRUPTION_BUDGET,
    kinds.AUTOSCALER, kinds.NETWORK_POLICY,
)  # fmt: skip
QUIET_SECONDS = 6.0


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


class Operator:
    """One operator process, with the settings of the chart."""

    def __init__(self, running: apiserver.Running, log: Path) -> None:
        (self.port,) = apiserver.free_ports(1)
        command = [sys.executable, "-m", "stoker_operator", f"--http-port={self.port}", "--http-host=127.0.0.1"]
        command += ["--lease-seconds=15", "--resync-seconds=3600", "--log-level=warning"]
        command += [f"--cache-storage-class={STORAGE_CLASS}"]
        with log.open("ab") as stream:
            environment = os.environ | {"KUBECONFIG": str(running.kubeconfig)}
            self.process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        server = running.processes.get("kube-apiserver")
        self._server = server.pid if server is not None else 0

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
            total("stoker_api_requests_total", WRITES),
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


async def answer_for_pods() -> web.AppRunner:
    """One server for the addresses of all pods."""

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "!"}]})

    async def progress(_: web.Request) -> web.Response:
        size = REPORT["bytes"]
        return web.json_response({"phase": "download", "bytesDone": size, "bytesTotal": size, "etaSeconds": 0})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/progress", progress)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in (PORT, PROGRESS_PORT):
        await web.TCPSite(runner, POD_ADDRESS, port).start()
    return runner


def stages() -> str:
    """What kwok does with nodes and pods, as its Stage objects."""
    now = "{{ $now := Now }}"
    ready = "".join(
        f'- {{type: {kind}, status: "True", lastTransitionTime: {{{{ $now | Quote }}}}}}\n'
        for kind in ("Initialized", "Ready", "ContainersReady")
    )
    containers = (
        "containerStatuses:\n{{ range .spec.containers }}\n"
        "- {name: {{ .name | Quote }}, image: {{ .image | Quote }}, ready: READY, restartCount: 0, state: STATE}\n"
        "{{ end }}\n"
    )
    running = containers.replace("READY", "true").replace("STATE", "{running: {startedAt: {{ $now | Quote }}}}")
    report = json.dumps(json.dumps(REPORT))
    ended = f"{{terminated: {{exitCode: 0, finishedAt: {{{{ $now | Quote }}}}, message: {report}}}}}"
    address = f"podIP: {POD_ADDRESS}\npodIPs: [{{ip: {POD_ADDRESS}}}]\n"
    documents = [
        _stage(
            "node",
            "Node",
            [{"key": ".status.phase", "operator": "NotIn", "values": ["Running"]}],
            f'{now}\nphase: Running\nconditions:\n- {{type: Ready, status: "True", reason: KubeletReady, message: "", '
            "lastHeartbeatTime: {{ $now | Quote }}, lastTransitionTime: {{ $now | Quote }}}\n",
        ),
        _stage(
            "starts",
            "Pod",
            [{"key": ".status.phase", "operator": "In", "values": ["Pending"]}, _alive()],
            f"{now}\nphase: Running\nstartTime: {{{{ $now | Quote }}}}\n{address}conditions:\n{ready}{running}",
        ),
        _stage(
            "ends",
            "Pod",
            [
                {"key": ".status.phase", "operator": "In", "values": ["Running"]},
                {"key": ".metadata.ownerReferences.[].kind", "operator": "In", "values": ["Job"]},
                _alive(),
            ],
            f"{now}\nphase: Succeeded\n{containers.replace('READY', 'false').replace('STATE', ended)}",
            delay=1000,
        ),
        _stage("goes", "Pod", [{"key": ".metadata.deletionTimestamp", "operator": "Exists"}], ""),
    ]
    return "\n---\n".join(json.dumps(item) for item in documents)


def _alive() -> dict[str, object]:
    return {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}


def _stage(
    name: str, kind: str, expressions: list[dict[str, object]], status: str, delay: int = 0
) -> dict[str, object]:
    spec: dict[str, object] = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": expressions},
        "next": {"statusTemplate": status} if status else {"delete": True},
    }
    spec |= {"delay": {"durationMilliseconds": delay}} if delay else {}
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


def simulate(running: apiserver.Running, folder: Path) -> None:
    """Start the scheduler and kwok; they end with the control plane."""
    binaries = ensure(["kube-scheduler", "kwok"])
    (folder / "stages.yaml").write_text(stages())
    client = {"kubeconfig": str(running.kubeconfig), "qps": 500, "burst": 1000}
    config = {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration"}
    scheduler = config | {"clientConnection": client, "leaderElection": {"leaderElect": False}}
    (folder / "scheduler.yaml").write_text(json.dumps(scheduler))
    (port,) = apiserver.free_ports(1)
    command = [str(binaries["kube-scheduler"]), f"--config={folder / 'scheduler.yaml'}", "--bind-address=127.0.0.1"]
    command += [f"--secure-port={port}", f"--cert-dir={folder / 'tls'}"]
    command += [f"--authentication-kubeconfig={running.kubeconfig}", f"--authorization-kubeconfig={running.kubeconfig}"]
    running.processes["kube-scheduler"] = apiserver.spawn(command, folder / "kube-scheduler.log")
    command = [str(binaries["kwok"]), f"--kubeconfig={running.kubeconfig}", f"--config={folder / 'stages.yaml'}"]
    running.processes["kwok"] = apiserver.spawn([*command, "--manage-all-nodes=true"], folder / "kwok.log")


async def furnish(running: apiserver.Running, count: int) -> None:
    """Nodes with GPUs, and a volume for every claim to come. Before kwok, which writes to the nodes too."""
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    cluster = await Cluster.connect()
    nodes, volumes = Kind("v1", "Node", "nodes"), Kind("v1", "PersistentVolume", "persistentvolumes")
    room = {"cpu": "10k", "memory": "100Ti", "ephemeral-storage": "100Ti", "pods": "10k", "nvidia.com/gpu": "1k"}

    async def make(kind: Kind, name: str, body: dict[str, object]) -> None:
        head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": ""}}
        await cluster.create(kind, head | body)

    status = {"allocatable": room, "capacity": room}
    await asyncio.gather(*(make(nodes, f"node-{number}", {"status": status}) for number in range(NODES)))
    for number in range(NODES):
        # New nodes are tainted as not ready, and the controller that takes this back wants heartbeats for it.
        there = await cluster.get(nodes, "", f"node-{number}")
        if there is not None and there["spec"].pop("taints", None):
            await cluster.replace(nodes, there | {"metadata": there["metadata"] | {"namespace": ""}})
    spec = {"capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": STORAGE_CLASS}
    spec |= {"hostPath": {"path": "/simulated"}}
    await asyncio.gather(*(make(volumes, f"volume-{number}", {"spec": spec}) for number in range(count)))
    await cluster.close()


async def create(cluster: Cluster, count: int) -> None:
    """Make the services, spread over a few namespaces."""

    async def one(number: int) -> None:
        spec = {"model": {"uri": f"hf://org/model-{number}"}, "resources": {"gpus": 1}}
        meta = {"name": f"service-{number}", "namespace": f"scale-{number % NAMESPACES}"}
        head = {"apiVersion": kinds.INFERENCE_SERVICE.api_version, "kind": kinds.INFERENCE_SERVICE.kind}
        await cluster.create(kinds.INFERENCE_SERVICE, head | {"metadata": meta, "spec": spec})

    await asyncio.gather(*(one(number) for number in range(count)))


async def change(cluster: Cluster, count: int) -> None:
    """Roll out another argument of some services."""

    async def one(number: int) -> None:
        name = f"service-{number}"
        there = await cluster.get(kinds.INFERENCE_SERVICE, f"scale-{number % NAMESPACES}", name)
        if there is None:
            raise SystemExit(f"{name} is gone")
        changed = there["spec"] | {"runtime": {"args": ["--max-queued", "99"]}}
        await cluster.replace(kinds.INFERENCE_SERVICE, there | {"spec": changed})

    await asyncio.gather(*(one(number) for number in range(count)))


async def settled(cluster: Cluster, count: int) -> bool:
    """Whether every service is Ready in its newest generation."""
    services = await cluster.list_all(kinds.INFERENCE_SERVICE, "")
    ready = 0
    for item in services:
        conditions = {entry["type"]: entry for entry in item.get("status", {}).get("conditions", ())}
        there = conditions.get("Ready", {})
        ready += there.get("status") == "True" and there["observedGeneration"] == item["metadata"]["generation"]
    return ready == count


async def versions(cluster: Cluster) -> dict[str, str]:
    """The resourceVersion of everything that the operator writes: any write to any of it changes it."""
    found = {}
    for kind in WRITTEN:
        for item in await cluster.list_all(kind, ""):
            # Kubernetes' own controllers repeat and forget their events.
            if kind is not kinds.EVENT or item.get("reportingComponent") == "stoker.dev/operator":
                found[item["metadata"]["uid"]] = item["metadata"]["resourceVersion"]
    return found


async def still(cluster: Cluster) -> dict[str, str]:
    """`versions`, once Kubernetes' own controllers have written what they had to."""
    found = await versions(cluster)
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        again = await versions(cluster)
        if again == found:
            return again
        found = again


async def wait_quiet(
    operator: Operator, done: Callable[[], Awaitable[bool]], seconds: float, least: float
) -> tuple[float, Sample]:
    """(seconds, counters) until `done` is true and the operator has nothing to do after `least` reconciles; the quiet
    at the end is not counted.
    """
    started = time.monotonic()
    last, since = None, started
    while time.monotonic() - started < seconds:
        await asyncio.sleep(0.5)
        if operator.process.poll() is not None:
            raise SystemExit("the operator ended; see its log")
        sample = await asyncio.to_thread(operator.sample)
        if sample is None:
            continue
        if last is None or (sample.reconciles, sample.writes) != (last.reconciles, last.writes):
            last, since = sample, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS and sample.reconciles >= least and await done():
            return since - started, sample
    raise SystemExit(f"not settled within {seconds:.0f} s: {last}")


def row(name: str, seconds: float, now: Sample, before: Sample | None, written: str) -> str:
    """One line of the table; `before` is where the operator's counters stood."""
    earlier = before or Sample(0, 0, 0, 0, 0, 0, 0)
    reconciles = max(now.reconciles - earlier.reconciles, 1)
    reads, writes, cpu = now.reads - earlier.reads, now.writes - earlier.writes, now.cpu - earlier.cpu
    cells = [name, f"{seconds:.0f}", f"{reconciles:.0f}", f"{reads / reconciles:.1f}", f"{writes / reconciles:.2f}"]
    cells += [f"{cpu:.1f}", f"{1000 * cpu / reconciles:.1f}", f"{now.memory:.0f}", f"{now.server - earlier.server:.0f}"]
    return f"| {' | '.join(cells)} | {written} |"


async def measure(running: apiserver.Running, folder: Path, count: int, limit: float) -> None:
    """Go through the phases and print the table."""
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    cluster = await Cluster.connect()
    pods = await answer_for_pods()
    operator = Operator(running, folder / "operator.log")

    async def done() -> bool:
        return await settled(cluster, count)

    try:
        print(f"{count} services, {NODES} nodes, {os.cpu_count()} CPUs", flush=True)
        print("| phase | seconds | reconciles | reads each | writes each | CPU s | CPU ms each | RSS MiB "
              "| API server CPU s | objects written |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        start = cpu_seconds(running.processes["kube-apiserver"].pid) if running.processes else 0.0
        await create(cluster, count)
        seconds, sample = await wait_quiet(operator, done, limit, count)
        before = await still(cluster)
        print(row("from nothing", seconds, sample, Sample(0, 0, 0, 0, 0, 0, start), f"{len(before)}"), flush=True)
        operator.stop()
        start = sample.server
        operator = Operator(running, folder / "operator.log")
        seconds, sample = await wait_quiet(operator, done, limit, count)
        after = await versions(cluster)
        changed = sum(before.get(uid) != version for uid, version in after.items()) + len(before.keys() - after.keys())
        print(row("after a restart", seconds, sample, Sample(0, 0, 0, 0, 0, 0, start), f"{changed}"), flush=True)
        await change(cluster, max(count // 10, 1))
        seconds, later = await wait_quiet(operator, done, limit, sample.reconciles + count // 10)
        changed = sum(after.get(uid) != version for uid, version in (await versions(cluster)).items())
        print(row("a change of a tenth", seconds, later, sample, f"{changed}"), flush=True)
    finally:
        operator.stop()
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        quick = ["--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-job-syncs=20"]
        running = apiserver.start(folder / "control-plane", controllers=CONTROLLERS, controller_flags=quick)
        try:
            kubectl = str(ensure(["kubectl"])["kubectl"])
            environment = os.environ | {"KUBECONFIG": str(running.kubeconfig)}

            def run(*arguments: str, check: bool = True) -> bool:
                command = [kubectl, *arguments]
                return subprocess.run(command, env=environment, check=check, capture_output=True).returncode == 0

            run("apply", "-f", str(ROOT / "crds" / "stoker.dev_inferenceservices.yaml"))
            # `kubectl wait` fails at once while an object has no conditions at all.
            while not run("wait", "--for=condition=Established", "crd/inferenceservices.stoker.dev", check=False):
                time.sleep(0.1)
            for number in range(NAMESPACES):
                run("create", "namespace", f"scale-{number}")
            asyncio.run(furnish(running, options.services))
            simulate(running, folder)
            asyncio.run(measure(running, folder, options.services, options.limit))
        finally:
            running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
