"""LeaderWorkerSets, which a cluster has by an installation of its own: here their kind, and a stand-in for their
controller (e2e/cluster/groups.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from e2e.cluster import groups
from e2e.cluster.crds import definitions
from e2e.scenarios.kube import Kube

from stoker_operator.cluster.api import Cluster


@pytest.fixture
def install_groups(kube: Kube, place: Kube, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Brings them to the cluster when it is called, for one test; one that has them is left alone."""
    if kube.find("crd", groups.CRD_NAME) is not None:
        yield lambda: None
        return
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    ended = threading.Event()
    worker = threading.Thread(target=lambda: asyncio.run(_stand_in(place.namespace, ended)), daemon=True)

    def install() -> None:
        for file in definitions("groups"):
            kube.kubectl("create", "-f", str(file))
        kube.wait("condition=Established", f"crd/{groups.CRD_NAME}", 60)
        worker.start()

    yield install
    # What it would do for objects that go is of no use, and its API goes with them.
    place.kubectl("delete", "infsvc", "--all", "--ignore-not-found", "--timeout=180s")
    ended.set()
    if worker.ident is not None:
        worker.join(30)
    kube.kubectl("delete", "crd", groups.CRD_NAME, "--ignore-not-found", "--timeout=60s")


async def _stand_in(namespace: str, ended: threading.Event) -> None:
    cluster = await Cluster.connect()
    task = asyncio.create_task(groups.follow(cluster, namespace))
    try:
        while not ended.is_set() and not task.done():
            await asyncio.sleep(0.2)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await cluster.close()
