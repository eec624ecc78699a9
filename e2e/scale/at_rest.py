"""What services that wait for a person cost while nothing happens: `python -m e2e.scale.at_rest --services 500`.

A real kube-apiserver with the real Job controller and no node. A quarter of the services waits each for a node, an
image, a claim of the user's, and a spec that can be used; they are made to look as if they had waited for an hour.

Invariants: the operator has the chart's settings, its resync included, but for a longer lease; all processes end with
this one.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from e2e.cluster import apiserver
from e2e.scale.control_plane import control_plane
from e2e.scale.operator_process import Operator, sampled
from e2e.scale.services import NAMESPACES

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster

CONTROLLERS = ("job-controller", "garbage-collector-controller", "persistentvolumeclaim-protection-controller")
RESYNC_SECONDS = 300
REASONS = ("Unschedulable", "ImagePullFailed", "VolumeMissing", "SpecInvalid")
_AGE = timedelta(hours=1)
_AT_ONCE = 16


def spec(number: int) -> dict[str, Any]:
    """A service that stalls for one of REASONS."""
    found: dict[str, Any] = {"model": {"uri": f"hf://org/model-{number}"}, "resources": {"gpus": 1}}
    if number % 4 == 2:
        found["cache"] = {"pvc": {"existingClaim": f"missing-{number}"}}
    if number % 4 == 3:
        found["runtime"] = {"args": ["--max-num-batched-token", "9"]}
    return found


async def create(cluster: Cluster, count: int) -> None:
    """Make the services, spread over the namespaces."""
    head = {"apiVersion": kinds.INFERENCE_SERVICE.api_version, "kind": kinds.INFERENCE_SERVICE.kind}
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        meta = {"name": f"service-{number}", "namespace": f"scale-{number % NAMESPACES}"}
        async with slots:
            await cluster.create(kinds.INFERENCE_SERVICE, head | {"metadata": meta, "spec": spec(number)})

    await asyncio.gather(*(one(number) for number in range(count)))


async def stall(cluster: Cluster) -> None:
    """The kubelet's and the scheduler's part: every prefetch's pod gets the status that it keeps."""
    for pod in await cluster.list_all(kinds.POD, "", "app.kubernetes.io/component=fetch"):
        if pod.get("status", {}).get("conditions"):
            continue
        number = int(pod["metadata"]["labels"]["app.kubernetes.io/instance"].removeprefix("service-"))
        said = "0/9 nodes are available: 9 node(s) didn't match Pod's node affinity/selector."
        conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}]
        status: dict[str, Any] = {"phase": "Pending", "conditions": conditions}
        if number % 4 == 1:
            conditions[0] = {"type": "PodScheduled", "status": "True"}
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            container = {"name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
            status["containerStatuses"] = [container | {"state": waiting}]
        meta = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
        await cluster.apply(kinds.POD, body, subresource="status", manager="kubelet")


async def stalled(cluster: Cluster, count: int) -> bool:
    """Whether every service says one of REASONS."""
    services = await cluster.list_all(kinds.INFERENCE_SERVICE, "")
    found = [item["reason"] for one in services for item in conditions(one) if item["type"] == "Ready"]
    return len(found) == count and all(reason in REASONS for reason in found)


def conditions(service: dict[str, Any]) -> list[dict[str, Any]]:
    """What its status says."""
    found: list[dict[str, Any]] = service.get("status", {}).get("conditions", [])
    return found


async def age(cluster: Cluster) -> None:
    """Let every condition be an hour old."""
    stamp = (datetime.now(UTC) - _AGE).strftime("%Y-%m-%dT%H:%M:%SZ")
    for one in await cluster.list_all(kinds.INFERENCE_SERVICE, ""):
        old = [item | {"lastTransitionTime": stamp} for item in conditions(one)]
        meta = {key: one["metadata"][key] for key in ("name", "namespace")}
        head = {"apiVersion": one["apiVersion"], "kind": one["kind"], "metadata": meta}
        try:
            await cluster.apply(kinds.INFERENCE_SERVICE, head | {"status": one["status"] | {"conditions": old}},
                                subresource="status")  # fmt: skip
        except ApiError as error:
            raise SystemExit(f"{meta['name']} cannot be aged: {error}") from None


async def measure(running: apiserver.Running, folder: Path, count: int, seconds: float) -> None:
    """Make the services, let them stall and age, and print what a minute costs."""
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    cluster = await Cluster.connect()
    server = running.processes["kube-apiserver"].pid
    operator = Operator(running.kubeconfig, folder / "operator.log", "", server, RESYNC_SECONDS, lease=120)
    try:
        await create(cluster, count)
        while not await stalled(cluster, count):
            await sampled(operator)
            await stall(cluster)
            await asyncio.sleep(2)
        await age(cluster)
        await asyncio.sleep(60)  # whoever was told of the new status has looked
        before = await sampled(operator)
        await asyncio.sleep(seconds)
        after = await sampled(operator)
    finally:
        operator.stop()
        await cluster.close()
    minutes = seconds / 60
    figures = {
        "reconciles": after.reconciles - before.reconciles,
        "reads": after.reads - before.reads,
        "writes": after.writes - before.writes,
        "CPU s": after.cpu - before.cpu,
        "API server CPU s": after.server - before.server,
    }
    print(f"{count} stalled services, a minute of {minutes:.0f}: ", end="")
    print(", ".join(f"{value / minutes:.2f} {name}" for name, value in figures.items()), f"{after.memory:.0f} MiB")


def main() -> int:
    """Start a control plane, measure, stop it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=500, help="how many InferenceServices (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=RESYNC_SECONDS, help="to measure (default: %(default)s)")
    options = parser.parse_args()
    with control_plane(CONTROLLERS) as (running, folder):
        asyncio.run(measure(running, folder, options.services, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
