"""mounts.py: a key Secret that is gone is told by the kubelet's events, read from a real API server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.mounts import Mounts

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
GONE = 'MountVolume.SetUp failed for volume "api-keys" : secret "team-keys" not found'


def pod(name: str, *, keys: bool = True, ready: bool = True) -> Object:
    labels = {"app.kubernetes.io/instance": f"of-{name}"}
    volumes = [{"name": "api-keys", "secret": {"secretName": "team-keys"}}] if keys else []
    return {
        "metadata": {"name": name, "uid": str(uuid.uuid4()), "namespace": "", "labels": labels},
        "spec": {"volumes": volumes},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class World:
    """Pods that a mirror knows, in a namespace of a real API server; who was told."""

    def __init__(self, cluster: Cluster, namespace: str, *pods: Object) -> None:
        self.cluster, self.namespace, self.pods = cluster, namespace, list(pods)
        for item in pods:
            item["metadata"]["namespace"] = namespace
        self.told: list[tuple[str, str]] = []
        self.lists = 0
        self.mounts = Mounts(cast(Mirror, self), (namespace,), self.add)

    async def each(self, kind: Any) -> AsyncIterator[Object]:
        for item in self.pods:
            yield item

    async def events_of_pods(self, namespace: str, reason: str) -> list[Object]:
        self.lists += 1
        return await self.cluster.events_of_pods(namespace, reason)

    async def add(self, key: tuple[str, str]) -> None:
        self.told.append(key)

    async def event(self, of: Object, message: str = GONE, reason: str = "FailedMount") -> None:
        """As a kubelet writes one, now."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = {"generateName": "p.", "namespace": self.namespace}
        about = {"kind": "Pod", "apiVersion": "v1", "namespace": self.namespace}
        about |= {key: of["metadata"][key] for key in ("name", "uid")}
        body = {"metadata": meta, "involvedObject": about, "reason": reason, "message": message, "type": "Warning"}
        await self.cluster.create(kinds.EVENT, body | {"firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1})

    async def look(self, ahead: float = 0) -> list[str]:
        self.told.clear()
        await self.mounts.look(datetime.now(UTC) + timedelta(seconds=ahead))
        return [name for _, name in self.told]


@pytest.fixture
def world(cluster: Cluster, namespace: str) -> Callable[..., World]:
    return lambda *pods: World(cluster, namespace, *pods)


async def test_a_secret_that_is_gone_is_told_once_and_so_is_its_return(world: Callable[..., World]) -> None:
    there = world(pod("a"), pod("b"))
    assert await there.look() == []
    await there.event(there.pods[1])
    assert await there.look() == ["of-b"]
    assert dict(there.mounts.failed()) == {there.pods[1]["metadata"]["uid"]: 'secret "team-keys" not found'}
    assert await there.look() == []
    assert await there.look(ahead=601) == ["of-b"], "what no event repeats is over"
    assert not there.mounts.failed()


async def test_what_else_kubelets_say_is_no_news(world: Callable[..., World]) -> None:
    there = world(pod("starting", ready=False), pod("other"))
    await there.event(there.pods[0])
    await there.event(there.pods[1], GONE.replace("api-keys", "models"))
    await there.event(there.pods[1], reason="Unhealthy")
    await there.event(pod("a-stranger"))
    assert await there.look() == []


async def test_a_pod_that_is_gone_is_forgotten(world: Callable[..., World]) -> None:
    there = world(pod("a"))
    await there.event(there.pods[0])
    assert await there.look() == ["of-a"]
    there.pods.clear()
    assert await there.look() == ["of-a"]
    assert not there.mounts.failed()


async def test_where_nobody_has_keys_nothing_is_asked(world: Callable[..., World]) -> None:
    there = world(pod("a", keys=False))
    assert await there.look() == []
    assert there.lists == 0
