"""The operator's process killed at random moments while services are made and changed: what serves goes on serving,
nothing is made twice, and in the end everything is as it was asked. STOKER_KILLS=50 kills it so many times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from tests.operator.beside import beside
from tests.operator.reconcile.kubelet import REPORT, UNSCHEDULED, condition
from tests.operator.test_operator import Start, restricted, start

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.workload import PORT
from stoker_operator.observe.rollout import TEMPLATE_HASH, is_ready, is_terminating

__all__ = ["restricted", "start"]
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(1500)]
Object = dict[str, Any]
KILLS = int(os.environ.get("STOKER_KILLS", "20"))
NAMES = ("alpha", "beta", "gamma")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """An address of this machine at which every engine answers, on the port that the operator asks."""

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "!"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host = f"127.{random.randrange(64, 128)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    await web.TCPSite(runner, host, PORT).start()
    yield host
    await runner.cleanup()


class Pods:
    """The kubelet's part, and a witness: `outages` are the services that served and of which no pod is ready now."""

    def __init__(self, cluster: Cluster, namespace: str, address: str) -> None:
        self._cluster, self._namespace, self._address = cluster, namespace, address
        self.served: set[str] = set()
        self.revisions: set[str] = set()
        self.outages: list[str] = []

    async def play(self) -> None:
        """Until cancelled: every prefetch succeeds, every engine runs a moment after it was made."""
        while True:
            pods = await self._cluster.list_all(kinds.POD, self._namespace)
            ready: set[str] = set()
            for pod in (pod for pod in pods if not is_terminating(pod)):
                labels = pod["metadata"]["labels"]
                fetches = labels["app.kubernetes.io/component"] == "fetch"
                if pod["status"]["phase"] == "Pending" and random.random() < 0.5:
                    await self._write(pod, self._ended() if fetches else self._running())
                elif is_ready(pod):
                    ready.add(labels["app.kubernetes.io/instance"])
                    self.revisions.add(labels.get(TEMPLATE_HASH, ""))
            self.outages += sorted(self.served - ready)
            self.served |= ready
            await asyncio.sleep(0.05)

    def _running(self) -> Object:
        ips = {"podIP": self._address, "podIPs": [{"ip": self._address}]}
        return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]} | ips

    def _ended(self) -> Object:
        ended = {"exitCode": 0, "message": json.dumps(REPORT), "finishedAt": "2026-01-01T00:00:00Z"}
        container = {"name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        return {"phase": "Succeeded", "containerStatuses": [container | {"state": {"terminated": ended}}]}

    async def _write(self, pod: Object, status: Object) -> None:
        head = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": head, "status": status}
        with suppress(ApiError):  # it may be gone by now
            await self._cluster.apply(kinds.POD, manifest, subresource="status", manager="kubelet")


async def test_killed_at_random_moments(
    start: Start,
    create: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    address: str,
    eventually: Callable[..., Any],
) -> None:
    chosen = random.Random()
    pods = Pods(cluster, namespace, address)

    async def renewed() -> str:
        """When a leader last said that it is one."""
        lease = await cluster.get(kinds.LEASE, namespace, "stoker")
        return str(lease["spec"]["renewTime"]) if lease is not None else ""

    async with beside(pods.play()):
        operator = start("one")
        for name in NAMES[:2]:
            await create(name, placement=UNSCHEDULED, model={"uri": f"hf://org/{name}"})
        for kill in range(KILLS):
            if kill == KILLS // 2:
                await create(NAMES[2], placement=UNSCHEDULED, model={"uri": "hf://org/gamma"})
            else:
                await change(cluster, namespace, chosen.choice(NAMES[: 2 + (kill > KILLS // 2)]), kill)
            before = await renewed()
            await eventually(lambda before=before: _is_another(renewed, before), 60)
            await asyncio.sleep(chosen.uniform(0.0, 2.0))
            operator.kill()
            operator.wait(10)
            operator = start("one")

        async def settled() -> bool:
            found = await cluster.list_all(kinds.INFERENCE_SERVICE, namespace)
            ready = [condition(item, "Ready") | {"now": item["metadata"]["generation"]} for item in found]
            return all(item["status"] == "True" and item["observedGeneration"] == item["now"] for item in ready)

        await eventually(settled, 120)
    assert pods.outages == [], "a service that served had no ready pod"
    assert len(pods.revisions) > KILLS // 5, "it was killed so early each time that it did nothing"
    await nothing_twice(cluster, namespace)


async def _is_another(read: Callable[[], Any], before: str) -> bool:
    return bool(await read() != before)


async def change(cluster: Cluster, namespace: str, name: str, seed: int) -> None:
    """Ask for another revision, as a user would."""
    head = {"name": name, "namespace": namespace}
    spec = {"runtime": {"args": ["--seed", str(seed)]}}
    manifest = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": head, "spec": spec}
    await cluster.apply(kinds.INFERENCE_SERVICE, manifest, manager="user")


async def nothing_twice(cluster: Cluster, namespace: str) -> None:
    """One of each, of the revision that was asked for last; and no more records than are kept."""
    for name in NAMES:
        ours = f"app.kubernetes.io/instance={name}"
        assert len(await cluster.list_all(kinds.JOB, namespace, ours)) == 1, "a model was fetched again"
        assert len(await cluster.list_all(kinds.CLAIM, namespace, ours)) <= 1
        records = await cluster.list_all(kinds.CONTROLLER_REVISION, namespace, ours)
        assert 1 <= len(records) <= 6
        service = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        deployment = await cluster.get(kinds.DEPLOYMENT, namespace, name)
        assert service is not None
        assert deployment is not None
        asked = service["spec"].get("runtime", {}).get("args", [])
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["args"][-len(asked) :] == asked or not asked
        pods = await cluster.list_all(kinds.POD, namespace, f"{ours},app.kubernetes.io/component=engine")
        assert len([pod for pod in pods if not is_terminating(pod)]) == 1
