"""pulse.py: who falls silent, and who answers again, is told once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from stoker_operator.observe import pulse as pulse_module
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.pod_http import Address, PodClient
from stoker_operator.observe.pulse import Pulse

Object = dict[str, Any]


def pod(name: str, *, ready: bool = True, component: str = "engine", **meta: Any) -> Object:
    labels = {"app.kubernetes.io/instance": f"of-{name}", "app.kubernetes.io/component": component}
    ports = [{"name": "http", "containerPort": 8000}]
    return {
        "metadata": {"name": name, "uid": name, "namespace": "ns", "labels": labels} | meta,
        "spec": {"containers": [{"name": "engine", "ports": ports}]},
        "status": {"podIP": f"ip-{name}", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class World:
    """Pods, those of them that do not answer, and who was asked and told."""

    def __init__(self, *pods: Object) -> None:
        self.pods, self.dead = list(pods), set[str]()
        self.said: dict[str, str] = {}
        self.asked: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.pulse = Pulse(cast(Mirror, self), cast(PodClient, self), self.add)

    async def each(self, kind: Any) -> AsyncIterator[Object]:
        for item in tuple(self.pods):
            yield item

    async def words(self, addresses: Sequence[Address]) -> list[str | None]:
        self.asked += [address.ip for address in addresses]
        return [None if address.ip in self.dead else self.said.get(address.ip, "") for address in addresses]

    async def add(self, key: tuple[str, str]) -> None:
        self.told.append(key)

    async def round(self) -> list[tuple[str, str]]:
        self.told.clear()
        await self.pulse.ask_all()
        return list(self.told)


async def test_silence_is_told_once_and_so_is_its_end() -> None:
    world = World(pod("a"), pod("b"))
    assert await world.round() == []
    world.dead.add("ip-b")
    assert await world.round() == [("ns", "of-b")]
    assert await world.round() == []
    world.dead.clear()
    assert await world.round() == [("ns", "of-b")]
    assert await world.round() == []


async def test_what_a_pod_says_is_told_once() -> None:
    world = World(pod("a"), pod("b"))
    world.said["ip-a"] = "no key"
    assert await world.round() == [("ns", "of-a")]
    assert await world.round() == []
    world.said["ip-a"] = "no key at all"
    assert await world.round() == [("ns", "of-a")]
    world.said.clear()
    assert await world.round() == [("ns", "of-a")]


async def test_only_who_is_said_to_be_ready_is_asked() -> None:
    starting, leaving = pod("starting", ready=False), pod("leaving", deletionTimestamp="t")
    world = World(pod("a"), starting, leaving, pod("fetching", component="fetch"))
    world.dead = {"ip-starting", "ip-leaving", "ip-fetching"}
    assert await world.round() == []
    assert world.asked == ["ip-a"]
    world.dead.add("ip-a")
    assert await world.round() == [("ns", "of-a")]
    world.pods.clear()
    assert await world.round() == []
    world.pods.append(pod("a") | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    assert await world.round() == []  # without an address nobody is asked


async def test_thousands_are_asked_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("stoker_operator.observe.pulse.asyncio.sleep", note)
    world = World(*(pod(f"pod-{number}") for number in range(777)))
    world.dead = {"ip-pod-3", "ip-pod-700"}
    assert await world.round() == [("ns", "of-pod-3"), ("ns", "of-pod-700")]
    assert sum(slept) == pytest.approx(777 / pulse_module.A_SECOND)
    assert len(slept) > 20, "all at once"
