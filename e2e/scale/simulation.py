"""What stands in for nodes and kubelets: kwok's stages, the real scheduler, GPUs and volumes, one server for all pods.

The pods' address is one of loopback, on which this process answers for every engine and every prefetch: the operator's
completions and polls are real requests.

Invariants: what is started ends with the control plane.
Knows nothing of InferenceServices and of what is measured.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web
from e2e.cluster import apiserver
from e2e.cluster.binaries import ensure

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.fetching.asking import PROGRESS_PORT
from stoker_operator.manifests.workload import PORT

NODES = 20
STORAGE_CLASS = "simulated"
_POD_ADDRESS = "127.77.0.1"
# What a prefetch says when it ends.
_REPORT = {
    "resolvedRevision": "c0ffee0123456789c0ffee0123456789c0ffee01",
    "digest": "sha256:" + "ab" * 32,
    "bytes": 98362432,
    "path": "sha256-abab",
    "serve": "sha256-abab",
    "shape": {"layers": 30, "kvHeads": 3, "headDim": 64, "maxContext": 8192},
}


async def answer_for_pods() -> web.AppRunner:
    """One server for the addresses of all pods."""

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "!"}]})

    async def progress(_: web.Request) -> web.Response:
        size = _REPORT["bytes"]
        return web.json_response({"phase": "download", "bytesDone": size, "bytesTotal": size, "etaSeconds": 0})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/progress", progress)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in (PORT, PROGRESS_PORT):
        await web.TCPSite(runner, _POD_ADDRESS, port).start()
    return runner


async def furnish(cluster: Cluster, count: int) -> None:
    """Nodes with GPUs, and a volume for every claim to come. Before kwok, which writes to the nodes too."""
    nodes, volumes = Kind("v1", "Node", "nodes"), Kind("v1", "PersistentVolume", "persistentvolumes")
    room = {"cpu": "10k", "memory": "100Ti", "ephemeral-storage": "100Ti", "pods": "10k", "nvidia.com/gpu": "1k"}

    async def make(kind: Kind, name: str, body: dict[str, object]) -> None:
        head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": ""}}
        try:
            await cluster.create(kind, head | body)
        except ApiError as error:
            if error.status != 409:  # it is there, of an earlier run
                raise

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


def simulate(running: apiserver.Running, folder: Path) -> None:
    """Start the scheduler and kwok; they end with the control plane."""
    binaries = ensure(["kube-scheduler", "kwok"])
    (folder / "stages.yaml").write_text(_stages())
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


def _stages() -> str:
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
    report = json.dumps(json.dumps(_REPORT))
    ended = f"{{terminated: {{exitCode: 0, finishedAt: {{{{ $now | Quote }}}}, message: {report}}}}}"
    address = f"podIP: {_POD_ADDRESS}\npodIPs: [{{ip: {_POD_ADDRESS}}}]\n"
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
