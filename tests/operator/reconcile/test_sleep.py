"""Sleep and waking against a real kube-apiserver: what is written, by whom, and what a request does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import aiohttp
import pytest
from aiohttp import web
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import Node, condition
from tests.operator.reconcile.sleeping import SCALING, Clock, clock, endpoint_slice, gauges, reconciler, until

from stoker_operator.activator.directory import read_sleeper
from stoker_operator.activator.main import Activator
from stoker_operator.activator.settings import ActivatorSettings
from stoker_operator.activator.wake import Waker
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests.activation import ASLEEP, AWAKE, WAKING, slice_port
from stoker_operator.reconcile import Reconciler

__all__ = ["clock", "gauges", "reconciler", "until"]
pytestmark = pytest.mark.apiserver


async def replicas(cluster: Cluster, namespace: str) -> int:
    found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert found is not None
    return int(found["spec"]["replicas"])


async def test_it_sleeps_and_a_wish_wakes_it(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    look: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    node: Node,
    gauges: dict[str, float],
) -> None:
    ready = await serve(autoscaling=SCALING)
    assert condition(ready, "ScaleToZero")["reason"] == "Awake"
    gauges["stoker:idle_seconds"] = 301
    await until(ASLEEP)
    asleep = await look("Asleep")
    assert await replicas(cluster, namespace) == 0
    assert await eventually(lambda: no_pods(node))
    assert condition(asleep, "EndpointReady")["reason"] == "Held"
    assert condition(asleep, "Stalled")["status"] == condition(asleep, "Reconciling")["status"] == "False"
    slices = await cluster.list_all(kinds.ENDPOINT_SLICE, namespace, "app.kubernetes.io/component=activator")
    assert slices[0]["endpoints"][0]["addresses"] == ["10.99.0.7"]

    async def left_alone() -> bool:
        await reconciler.reconcile(namespace, "demo")
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        return found is not None and condition(found, "AutoscalingActive")["reason"] == "ScaledToZero"

    assert await eventually(left_alone), "the HorizontalPodAutoscaler has said its word"
    before = await versions(cluster, namespace)
    for _ in range(3):
        await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == before

    sleeper = read_sleeper((namespace, "demo"), slices)
    assert sleeper is not None
    waker = Waker(cluster)
    waker.call(sleeper, "POST /v1/embeddings")

    async def woken() -> bool:
        await reconciler.reconcile(namespace, "demo")
        return await replicas(cluster, namespace) == 1

    assert await eventually(woken)
    await waker.close()
    waking = await look("Waking")
    assert waking["status"]["sleep"]["why"] == "POST /v1/embeddings"
    assert waking["status"]["sleep"]["step"] in ("a pod waits for a node", "its pod is being made")
    gauges["stoker:idle_seconds"] = 0
    await node.run_all(1)
    await look("Serving")
    awake = await until(AWAKE)
    assert awake["status"]["wake"]["by"] == "POST /v1/embeddings", "the operator leaves what is not its own"
    [noted] = await cluster.list_all(kinds.ENDPOINT_SLICE, namespace, "app.kubernetes.io/component=activator")
    assert not noted.get("endpoints")
    said = kubectl("events", "--for", "inferenceservice/demo")
    for words in ("Asleep", "Waking", "Updated EndpointSlice demo-activator: it wakes: POST /v1/embeddings"):
        assert words in said


async def no_pods(node: Node) -> bool:
    return not await node.pods("engine")


async def test_the_scale_of_either_object_wakes(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    node: Node,
    gauges: dict[str, float],
) -> None:
    external = SCALING | {"engine": "External"}
    await serve(autoscaling=external)
    gauges["stoker:idle_seconds"] = 400
    await until(ASLEEP)
    kubectl("scale", "deployment", "demo", "--replicas=1")
    await until(WAKING)
    await node.run_all(1)
    await until(AWAKE)
    await until(ASLEEP)
    kubectl("scale", "infsvc", "demo", "--replicas=2")
    await until(WAKING)
    assert await replicas(cluster, namespace) == 2
    await node.run_all(2)
    await until(AWAKE)
    gauges["stoker:idle_seconds"] = 1
    kubectl("scale", "infsvc", "demo", "--replicas=0")
    await until(ASLEEP)
    assert await replicas(cluster, namespace) == 0


async def test_a_schedule_wakes_it_and_raises_the_autoscalers_minimum(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    node: Node,
    gauges: dict[str, float],
    clock: Clock,
) -> None:
    begins = datetime.now(ZoneInfo("Asia/Kathmandu")) + timedelta(hours=3)
    hours = {"start": f"{begins.minute} {begins.hour} * * *", "timezone": "Asia/Kathmandu", "min": 2}
    hours["end"] = f"{begins.minute} {(begins.hour + 2) % 24} * * *"
    await serve(autoscaling=SCALING | {"scaleToZero": SCALING["scaleToZero"] | {"schedule": [hours]}})
    gauges["stoker:idle_seconds"] = 400
    asleep = await until(ASLEEP)
    assert asleep["status"]["sleep"]["wakesAt"] == begins.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:00Z")
    clock.pass_by(3 * 3600)
    await until(WAKING)
    assert await replicas(cluster, namespace) == 2
    scaler = await cluster.get(kinds.AUTOSCALER, namespace, "demo")
    assert scaler is not None
    assert scaler["spec"]["minReplicas"] == 2
    await node.run_all(2)
    awake = (await until(AWAKE))["status"]["sleep"]
    assert awake["until"] == (begins.astimezone(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:00Z")
    assert "its schedule has 2 pods run until" in awake["why"]
    clock.pass_by(2 * 3600)
    await until(ASLEEP)
    scaler = await cluster.get(kinds.AUTOSCALER, namespace, "demo")
    assert scaler is not None
    assert scaler["spec"]["minReplicas"] == 1


def own_address() -> str:
    """An address of this machine that is not loopback, which an EndpointSlice must not hold."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


async def test_a_request_at_the_activator_wakes_it_and_is_answered_by_its_pod(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    node: Node,
    gauges: dict[str, float],
) -> None:
    """The activator's process, its watches and its wish, with a real API server; a pod that answers at this machine."""
    address, asked = own_address(), []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"from": "the pod"})

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    pod = web.AppRunner(app)
    await pod.setup()
    await web.TCPSite(pod, address, 0).start()
    stop = asyncio.Event()
    settings = ActivatorSettings(namespaces=(namespace,), http_port=0, http_host="127.0.0.1", leave_seconds=0)
    activator = Activator(cluster, settings)
    running = asyncio.create_task(activator.run(stop))
    try:
        await serve(autoscaling=SCALING)
        gauges["stoker:idle_seconds"] = 999
        await until(ASLEEP)
        [noted] = await cluster.list_all(kinds.ENDPOINT_SLICE, namespace, "app.kubernetes.io/component=activator")
        port = slice_port(noted)
        await eventually(lambda: activator.doors is not None and port in activator.doors.open)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
            async with client.get(f"http://127.0.0.1:{activator.health_port}/readyz") as ready:
                assert ready.status == 200
            sent = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"}))
            await until(WAKING, passing=0)
            await node.run_all(1)
            labels = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo",
                      "app.kubernetes.io/component": "engine"}  # fmt: skip
            there = endpoint_slice("demo-x1", "demo", address, pod.addresses[0][1], **labels)
            kubectl("create", "-f", "-", stdin=json.loads(json.dumps(there)))
            async with await sent as answered:
                assert (answered.status, await answered.json()) == (200, {"from": "the pod"})
        assert asked == [{"prompt": "x"}]
        await until(AWAKE)
    finally:
        stop.set()
        await asyncio.wait_for(running, 30)
        await pod.cleanup()
