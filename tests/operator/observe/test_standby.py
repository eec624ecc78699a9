"""standby.py: filled before anybody leads, silent until then, and whose change nobody has seen goes first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import Kind
from stoker_operator.cluster.queue import Key
from stoker_operator.observe import standby as standby_module
from stoker_operator.observe.standby import CHILD_SECONDS, Standby
from stoker_operator.settings import Settings

Object = dict[str, Any]


def service(name: str, version: int, generation: int, looked_at: int | None) -> Object:
    meta = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version), "generation": generation}
    status = {} if looked_at is None else {"observedGeneration": looked_at}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": meta, "spec": {"a": version},
            "status": status}  # fmt: skip


class Recording(Cluster):
    """Reads only: any write is an AttributeError. Lists `services`, after it refused `refusals` times."""

    def __init__(self, services: Sequence[Object], refusals: int = 0) -> None:
        super().__init__(None, 1)
        self.services, self.refusals = services, refusals
        self.listed: list[str] = []
        self.events: dict[str, asyncio.Queue[Any]] = {}

    async def served(self, wanted: Sequence[Kind]) -> frozenset[str]:
        return frozenset({"HTTPRoute"} & {kind.kind for kind in wanted})

    async def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        if self.refusals:
            self.refusals -= 1
            raise ApiError(503, "", "not yet")
        self.listed.append(kind.kind)
        yield [dict(each) for each in self.services] if kind is kinds.INFERENCE_SERVICE else [], "100"

    async def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        told = self.events.setdefault(kind.kind, asyncio.Queue())
        while True:
            yield await told.get()


def beside(cluster: Recording, **settings: Any) -> Standby:
    made = Standby(cluster, Settings(**settings))
    for name in ("served", "pages", "watch"):
        setattr(made.mirror, name, getattr(cluster, name))
    return made


class Adds:
    """Notes what is added: (name, seconds, routine)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, bool]] = []

    async def __call__(self, key: Key, after: float = 0.0, *, routine: bool = False) -> None:
        self.seen.append((key[1], after, routine))


async def test_nobody_is_told_before_it_is_taken_up() -> None:
    lagging = random.randint(2, 9)
    rows = [service("rest", 5, 3, 3), service("lags", 6, lagging, lagging - 1), service("new", 7, 1, None)]
    cluster, adds = Recording(rows), Adds()
    standby = beside(cluster)
    try:
        await asyncio.wait_for(standby.filled(), 20)
        assert {"InferenceService", "Pod", "PersistentVolumeClaim", "HTTPRoute"} <= set(cluster.listed)
        assert "EndpointSlice" not in cluster.listed, "without an activator there is no right to them"
        cluster.events["InferenceService"].put_nowait(("MODIFIED", service("rest", 101, 4, 3)))
        await asyncio.sleep(0.01)
        assert adds.seen == []
        await standby.take_up(adds)
        assert sorted(adds.seen) == [("lags", 0.0, False), ("new", 0.0, False), ("rest", 0.0, False)]
        adds.seen.clear()
        cluster.events["InferenceService"].put_nowait(("MODIFIED", service("rest", 102, 4, 4)))
        meta = {"name": "pod", "namespace": "ns", "uid": "p", "resourceVersion": "103"}
        meta |= {"labels": {"app.kubernetes.io/instance": "lags", "app.kubernetes.io/managed-by": "stoker"}}
        cluster.events["Pod"].put_nowait(("ADDED", {"apiVersion": "v1", "kind": "Pod", "metadata": meta}))
        await asyncio.sleep(0.01)
        assert sorted(adds.seen) == [("lags", CHILD_SECONDS, False), ("rest", 0.0, False)]
    finally:
        await standby.stop()


async def test_what_is_at_rest_is_looked_at_last() -> None:
    rows = [service(f"s{number}", number, number % 5 + 1, number % 5 + number % 2) for number in range(1, 90)]
    adds, standby = Adds(), beside(Recording(rows), activator_service="activator")
    try:
        await asyncio.wait_for(standby.filled(), 20)
        await standby.take_up(adds)
        assert sorted(adds.seen) == sorted((f"s{number}", 0.0, number % 2 == 1) for number in range(1, 90))
    finally:
        await standby.stop()


async def test_an_api_server_that_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "AGAIN_SECONDS", 0.001)
    cluster = Recording([service("a", 5, 1, 1)], refusals=random.randint(2, 5))
    standby = beside(cluster, activator_service="activator")
    try:
        await asyncio.wait_for(standby.filled(), 20)
        assert cluster.refusals == 0
        assert "EndpointSlice" in cluster.listed
    finally:
        await standby.stop()
