"""The life of one service over two weeks: it comes up, things befall it, all is mended, it is deleted.

What holds at the end: a service that nothing troubles any more serves, sleeps or is suspended as its spec says; at rest
nobody writes, an operator that has just started neither; a service that is deleted leaves nothing behind.
Knows nothing of how histories are chosen.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.weeks import checks
from tests.operator.weeks.events import EVENTS, OFFICE
from tests.operator.weeks.world import BEGIN, World

from stoker_operator.cluster import kinds

GOOD: dict[str, Any] = {
    "model": {"uri": "hf://org/model-0"},
    "resources": {"gpus": 1, "memory": "4Gi"},
    "runtime": {"args": ["--seed", "1"]},
    "cache": {"retain": "24h"},
    "endpoint": {"httpRoute": {"parentRefs": [{"name": "gw"}], "hostnames": ["demo.example.com"]}},
    "autoscaling": {"engine": "HPA", "min": 0, "max": 3, "scaleToZero": {"idleAfter": "15m", "schedule": [OFFICE]}},
}
WEEKS = timedelta(weeks=2)
QUIET_SECONDS = 2 * 3600
TRAFFIC_SECONDS = 3600

# Writes an hour where nothing befalls: a schedule's pods that come and go, look-ups of what is followed.
MOST_WRITES = 400


class Life:
    """Use `begin`, then `step` as often as wanted, then `end`."""

    def __init__(self) -> None:
        self.world = World()

    async def begin(self) -> None:
        """Two nodes of two GPUs; the service is made, and serves."""
        for name in ("a", "b"):
            self.world.machines.add(name, 2)
        self.world.make(GOOD)
        await self.world.pass_by(300)
        ready = condition(self.world.service, "Ready")
        assert ready["status"] == "True", f"it does not come up: {ready['message']}"

    async def step(self, what: str, n: int, gap: int) -> None:
        """Something befalls it, and so many seconds pass."""
        self.world.said.append(f"--- {self.world.time:%d. %H:%M:%S} {what} {n}, then {gap} s")
        EVENTS[what](self.world, n)
        await self.world.pass_by(min(gap, TRAFFIC_SECONDS))
        if gap > TRAFFIC_SECONDS:
            self._quiet()
            await self.world.pass_by(gap - TRAFFIC_SECONDS)

    def _quiet(self) -> None:
        """Clients go home, and sources answer: what fails for days is tried again every ten minutes, for days."""
        self.world.machines.fetch_fails = ""
        self.world.traffic.turn(False)
        self.world.controllers.load = 1

    async def end(self) -> None:
        """The rest of the two weeks, and what must hold then."""
        self._quiet()
        left = BEGIN + WEEKS - self.world.time
        written = len(self.world.store.writes)
        if left > timedelta():
            await self.world.pass_by(left.total_seconds())
            most = 100 + MOST_WRITES * left.total_seconds() / 3600
            assert len(self.world.store.writes) - written < most, f"it writes for ever: {self.world.store.writes[-12:]}"
        await self._mended()
        await self._deleted()

    async def _mended(self) -> None:
        """Nodes, source and operator are well again, and so is the spec."""
        world = self.world
        world.said.append("--- mended")
        for name in [*world.machines.nodes]:
            world.machines.come_back(name)
        for name in ("a", "b"):
            if name not in world.machines.nodes:
                world.machines.add(name, 2)
        world.machines.fetch_fails, world.store.dies_before, world.store.refuses = "", None, 0
        world.skew, world.holders.addresses = timedelta(), ("10.99.0.7",)
        seed = ["--seed", "1000003"]  # of no kind that fails
        world.change(runtime={"args": seed, "image": None}, canary=None, rollout=None, suspend=False)
        if not world.service["spec"].get("autoscaling"):
            world.change(replicas=2)
        await world.pass_by(QUIET_SECONDS)
        ready = condition(world.service, "Ready")
        assert ready["reason"] in ("Serving", "Asleep", "ScaledToZero"), f"{ready['reason']}: {ready['message']}"
        await self._rests()

    async def _rests(self) -> None:
        """Nobody has anything left to do, an operator that has just started neither."""
        world = self.world
        checks.at_rest(world)
        written = len(world.store.writes)
        world.take_over()
        await world.pass_by(0)
        assert len(world.store.writes) == written, f"a new operator writes {world.store.writes[written:]}"

    async def _deleted(self) -> None:
        """It leaves nothing, but for volumes that are to be retained, and those as long as they are."""
        world = self.world
        world.said.append("--- deleted")
        world.store.forget(world.service)
        await world.pass_by(QUIET_SECONDS)
        left = [item for item in world.store.everything() if item["kind"] != kinds.CLAIM.kind]
        assert not left, f"left behind: {[(item['kind'], item['metadata']['name']) for item in left]}"
        await world.pass_by(26 * 3600)
        left = world.store.everything()
        assert not left, f"volumes that nobody ends: {checks.names(left)}"
