"""Canaries against a real kube-apiserver: what comes beside the stable pods, what becomes of it, and that the stable
pods never notice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import REPORT, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import workload
from stoker_operator.manifests.fetching import asking
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
# Each side's pods have an address of their own, so that one server can answer for both.
ADDRESSES = {"engine": "127.0.0.1", "canary": "127.0.0.2"}


class Engines:
    """What the pods of either side say they did: sums over all requests. `milliseconds` to a first token."""

    def __init__(self) -> None:
        self.told = {side: {"answered": 0, "failed": 0, "milliseconds": 0.0} for side in ADDRESSES}

    def serve(self, side: str, requests: int, *, failed: int = 0, milliseconds: float = 40.0) -> None:
        sums = self.told[side]
        sums["answered"] += requests
        sums["failed"] += failed
        sums["milliseconds"] += requests * milliseconds

    def page(self, side: str) -> str:
        sums = self.told[side]
        first, model = "vllm:time_to_first_token_seconds", 'model_name="demo"'
        return (
            f'vllm:request_success_total{{{model},finished_reason="length"}} {sums["answered"]}\n'
            f'vllm:request_success_total{{{model},finished_reason="error"}} {sums["failed"]}\n'
            f"{first}_sum{{{model}}} {sums['milliseconds'] / 1000}\n{first}_count{{{model}}} {sums['answered']}\n"
        )


class Clock:
    """The operator's, which goes on by more than the others'."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        self.ahead += timedelta(seconds=6)
        return datetime.now(UTC) + self.ahead


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> AsyncIterator[list[Object]]:
    """What engines answer, at the address of their side."""
    asked: list[Object] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"text": "!"}]})

    async def metrics(request: web.Request) -> web.Response:
        assert request.transport is not None
        here = request.transport.get_extra_info("sockname")[0]
        return web.Response(text=engines.page(next(side for side, ip in ADDRESSES.items() if ip == here)))

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ADDRESSES["engine"], 0).start()
    port = runner.addresses[0][1]
    await web.TCPSite(runner, ADDRESSES["canary"], port).start()
    monkeypatch.setattr(workload, "PORT", port)
    monkeypatch.setattr(asking, "PROGRESS_PORT", port)
    yield asked
    await runner.cleanup()


@pytest.fixture
def reconciler(reconciler: Reconciler) -> Reconciler:
    return replace(reconciler, clock=Clock())


@pytest.fixture
def until(
    reconciler: Reconciler, namespace: str, node: Node, eventually: Callable[..., Any], engines: Engines
) -> Callable[..., Any]:
    """Reconcile, with pods that start and requests that come, until the canary stands in `state`; the whole object."""

    async def wait(state: str, *, step: int = 0, run: bool = True, **served: float) -> Object:
        async def there() -> Object | None:
            await reconciler.reconcile(namespace, "demo")
            for pod in await node.pods("fetch") if run else ():
                if not pod["status"].get("containerStatuses"):
                    node.end(pod, 0, REPORT)
            for side, address in ADDRESSES.items():
                engines.serve(
                    side, 7, **({key: int(value) for key, value in served.items()} if side != "engine" else {})
                )
                for pod in await node.pods(side) if run else ():
                    if not is_ready(pod):
                        ready = {"type": "Ready", "status": "True"}
                        node.patch(pod, {"phase": "Running", "podIP": address, "conditions": [ready]}, check=False)
            found = await reconciler.cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
            assert found is not None
            stands = found["status"].get("canary") or {}
            return found if stands.get("state") == state and step in (0, stands["step"]) else None

        found: Object = await eventually(there)
        return found

    return wait


def change(kubectl: Callable[..., str], **fields: Any) -> None:
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", json.dumps(fields))


async def stable(cluster: Cluster, namespace: str, node: Node) -> tuple[int, list[str]]:
    """What must not change for a canary: the generation of the stable Deployment, and its pods."""
    found = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
    assert found is not None
    return found["metadata"]["generation"], sorted(pod["metadata"]["uid"] for pod in await node.pods("engine"))


async def selected(cluster: Cluster, namespace: str, name: str) -> Object:
    found = await cluster.get(kinds.SERVICE, namespace, name)
    assert found is not None
    return dict(found["spec"]["selector"])


async def test_a_good_model_is_fetched_compared_promoted_and_moved_into_the_spec(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    look: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    node: Node,
    eventually: Callable[..., Any],
) -> None:
    await serve(replicas=3, drain={"preStop": "0s", "timeout": "0s"})
    before = await stable(cluster, namespace, node)
    canary = {"steps": [20, 40], "window": "10s", "requests": 5, "model": {"revision": "v9"}}
    change(kubectl, spec={"canary": canary})
    starting = await until("Starting", run=False)
    assert "waits for its weights" in condition(starting, "Canary")["message"]
    assert len(await cluster.list_all(kinds.CLAIM, namespace)) == 2
    first = await until("Running", step=1)
    assert len(await node.pods("canary")) == 1
    [pod] = await node.pods("canary")
    assert "sha256-abab/m.gguf" in str(pod["spec"])
    assert condition(first, "Ready")["status"] == "True"
    second = await until("Running", step=2)
    told = second["status"]["canary"]
    assert (told["weight"], told["steps"]) in ((20, 2), (40, 2))
    assert not set((await selected(cluster, namespace, "demo")).items()) - set(pod["metadata"]["labels"].items())

    async def two() -> bool:
        await reconciler.reconcile(namespace, "demo")
        return len(await node.pods("canary")) == 2

    await eventually(two)
    assert await stable(cluster, namespace, node) == before
    await until("Promoting")
    promoted = await until("Promoted")
    ready = await look("Serving")
    assert "kubectl stoker promote demo --spec" in condition(promoted, "Canary")["message"]
    assert ready["status"]["model"]["resolvedRevision"] == "c0ffee0123456789"

    async def alone() -> bool:
        await reconciler.reconcile(namespace, "demo")
        gone = await cluster.get(kinds.DEPLOYMENT, namespace, "demo-canary")
        claims = await cluster.list_all(kinds.CLAIM, namespace)
        return gone is None and len(claims) == 1 and not await node.pods("canary")

    await eventually(alone)
    assert (await selected(cluster, namespace, "demo"))["app.kubernetes.io/component"] == "engine"
    assert await cluster.get(kinds.SERVICE, namespace, "demo-canary") is None
    there = await versions(cluster, namespace)
    for _ in range(3):
        await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == there
    after = await stable(cluster, namespace, node)
    assert not set(after[1]) & set(before[1])

    change(kubectl, spec={"canary": None, "model": {"revision": "v9"}})
    moved = await look("Serving")
    assert "canary" not in moved["status"]
    assert not condition(moved, "Canary")["reason"]
    assert await stable(cluster, namespace, node) == after
    said = kubectl("events", "--for", "inferenceservice/demo")
    for reason in ("CanaryStarting", "CanaryRunning", "CanaryPromoting", "CanaryPromoted"):
        assert reason in said


async def test_one_that_fails_requests_is_taken_back_and_stays_so(
    serve: Callable[..., Any],
    until: Callable[..., Any],
    reconciler: Reconciler,
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    node: Node,
    eventually: Callable[..., Any],
) -> None:
    await serve(drain={"preStop": "0s", "timeout": "0s"})
    before = await stable(cluster, namespace, node)
    canary = {"weight": 5, "window": "24h", "requests": 5, "runtime": {"args": ["--seed", "71"]}}
    change(kubectl, spec={"canary": canary})
    running = await until("Running")
    assert running["status"]["canary"]["share"] == 50
    assert "where 5 % are asked for" in condition(running, "Canary")["message"]
    failed = await until("Failed", failed=2)
    said = condition(failed, "Canary")
    assert (said["status"], said["reason"]) == ("False", "CanaryFailed")
    assert "requests failed" in said["message"]
    assert condition(failed, "Ready")["status"] == "True"

    async def gone() -> bool:
        await reconciler.reconcile(namespace, "demo")
        return not await node.pods("canary") and not await cluster.get(kinds.DEPLOYMENT, namespace, "demo-canary")

    await eventually(gone)
    there = await versions(cluster, namespace)
    for _ in range(3):
        await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == there
    assert await stable(cluster, namespace, node) == before
    change(kubectl, spec={"canary": {"weight": 7}})  # of the same canary: it was judged
    await until("Failed")
    change(kubectl, spec={"canary": {"runtime": {"args": ["--seed", "72"]}}})
    await until("Running")
    name = (await until("Running"))["status"]["canary"]["name"]
    change(kubectl, metadata={"annotations": {"stoker.dev/canary": f"abort {name}"}})
    await until("Aborted")
    await eventually(gone)
    assert await stable(cluster, namespace, node) == before
