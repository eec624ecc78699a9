"""Fixtures of reconciles against a real kube-apiserver with real Deployment, ReplicaSet, Job and garbage controllers.

There is no node: the `node` fixture writes the pod statuses that a kubelet would write. Engine and prefetch answer
from a real HTTP server on loopback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import workload
from stoker_operator.manifests.fetching import asking
from stoker_operator.reconcile import Reconciler

Object = dict[str, Any]


@pytest.fixture
def gauges() -> dict[str, float]:
    """What every engine says of itself at /metrics: nothing, unless a test has it say something."""
    return {}


@pytest.fixture
def ready() -> Object:
    """What every engine answers at /ready; a test may have it say more."""
    return {"status": "ready"}


@pytest.fixture
async def engine(
    monkeypatch: pytest.MonkeyPatch, gauges: dict[str, float], ready: Object
) -> AsyncIterator[list[Object]]:
    """What engines and prefetches would answer, from one server whose port the manifests name; the requests it got."""
    asked: list[Object] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"text": "!"}]})

    async def progress(_: web.Request) -> web.Response:
        answer = {"phase": "download", "bytesDone": 25_000_000, "bytesTotal": 100_000_000, "etaSeconds": 9}
        return web.json_response(answer)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in gauges.items()))

    async def say_ready(_: web.Request) -> web.Response:
        return web.json_response(ready)

    app = web.Application()
    app.router.add_get("/ready", say_ready)
    app.add_routes(
        [web.post("/v1/completions", complete), web.get("/progress", progress), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(workload, "PORT", runner.addresses[0][1])
    monkeypatch.setattr(asking, "PROGRESS_PORT", runner.addresses[0][1])
    yield asked
    await runner.cleanup()


@pytest.fixture
def node(cluster: Cluster, namespace: str, kubectl: Callable[..., str], eventually: Callable[..., Any]) -> Node:
    return Node(cluster, namespace, kubectl, eventually)


@pytest.fixture
async def bare_node(namespace: str, kubectl: Callable[..., str]) -> AsyncIterator[str]:
    """A Node that nobody has said anything of yet; its name."""
    name = f"node-{namespace}"
    kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield name
    kubectl("delete", "node", name)


@pytest.fixture
def look(reconciler: Reconciler, namespace: str, eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Reconcile `name` until its Ready condition has `reason`; returns the whole object."""

    async def until(reason: str, name: str = "demo", seconds: float = 60.0) -> Object:
        async def there() -> Object | None:
            await reconciler.reconcile(namespace, name)
            found = await reconciler.cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
            assert found is not None
            return found if condition(found, "Ready")["reason"] == reason else None

        found: Object = await eventually(there, seconds)
        return found

    return until


@pytest.fixture
def serve(
    create: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    engine: list[Object],
) -> Callable[..., Any]:
    """Create a service and play it to Ready."""

    async def run(name: str = "demo", /, **spec: Any) -> Object:
        await create(name, placement=UNSCHEDULED, **spec)
        await look("Fetching", name)
        await node.fetch_all()
        await look("RollingOut", name)
        await node.run_all(spec.get("replicas", 1))
        return await look("Serving", name)  # type: ignore[no-any-return]

    return run
