"""An operator's parts behind a faulty API server: mirror, queue and reconciler, as in its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.operator.faulty.proxy import Proxy
from tests.operator.reconcile.conftest import engine, gauges, node, ready

from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.queue import WorkQueue
from stoker_operator.manifests.cache import services_of
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings

__all__ = ["engine", "gauges", "node", "ready"]


@pytest.fixture
async def proxy(control_plane: Path, namespace: str, tmp_path: Path) -> AsyncIterator[Proxy]:
    opened = Proxy(control_plane, tmp_path / "through-the-proxy")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def behind(proxy: Proxy, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reconciler]:
    """The operator's work on the test's namespace, all of it through the proxy, until the test ends."""
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", str(proxy.kubeconfig))
        cluster = await Cluster.connect()

    async def child_changed(meta: Mapping[str, Any]) -> None:
        for name in services_of(meta):
            await queue.add((meta["namespace"], name))

    async def service_changed(meta: Mapping[str, Any]) -> None:
        await queue.add((meta["namespace"], meta["name"]))

    mirror = Mirror(cluster, (namespace,), child_changed, service_changed)
    reconciler = Reconciler(mirror, PodClient(2.0), Settings())
    queue = WorkQueue(reconciler.reconcile, workers=4, per_second=200)
    await queue.add((namespace, "demo"))
    work = asyncio.create_task(queue.run())
    yield reconciler
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await mirror.stop()
    await cluster.close()
