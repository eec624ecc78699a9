"""A service that may sleep, on a real API server: an activator that is ready, and a clock that the test sets ahead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.activators import Activators
from stoker_operator.observe.mirror import Mirror
from stoker_operator.reconcile import Reconciler

Object = dict[str, Any]
SCALING = {"min": 0, "max": 2, "scaleToZero": {"idleAfter": "5m", "maxQueued": 3, "maxWait": "1m"}}
SERVICE = "holders"


class Clock:
    """The operator's, ahead of the others'."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def pass_by(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)


@pytest.fixture
def gauges() -> dict[str, float]:
    """Engines that tell of their load, and have had a request a moment ago."""
    return {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "stoker:idle_seconds": 0}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def endpoint_slice(name: str, service: str, address: str, port: int, **labels: str) -> Object:
    """As Kubernetes' own controller writes it for a Service."""
    head = {"name": name, "labels": {"kubernetes.io/service-name": service, **labels}}
    endpoints = [{"addresses": [address], "conditions": {"ready": True}}]
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": head, "addressType": "IPv4",
            "endpoints": endpoints, "ports": [{"name": "http", "port": port}]}  # fmt: skip


@pytest.fixture
async def reconciler(
    cluster: Cluster, reconciler: Reconciler, namespace: str, kubectl: Callable[..., str], clock: Clock
) -> AsyncIterator[Reconciler]:
    """The operator's, with an activator that is ready at an address where nobody listens."""

    async def nobody(_: Any) -> None:
        pass

    kubectl("create", "-f", "-", stdin=endpoint_slice("holders-1", SERVICE, "10.99.0.7", 8080))
    mirror = Mirror(cluster, (namespace,), nobody)
    activators = Activators(cluster, mirror, namespace, SERVICE, nobody)
    await activators.look()
    yield replace(reconciler, cluster=mirror, activators=activators, clock=clock)
    await mirror.stop()


@pytest.fixture
def until(reconciler: Reconciler, namespace: str, eventually: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """Reconcile, with time passing, until the service stands in `state`; the whole object."""

    async def wait(state: str, *, passing: float = 2.0) -> Object:
        async def there() -> Object | None:
            clock.pass_by(passing)
            await reconciler.reconcile(namespace, "demo")
            found = await reconciler.cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
            assert found is not None
            return found if (found["status"].get("sleep") or {}).get("state") == state else None

        found: Object = await eventually(there)
        return found

    return wait
