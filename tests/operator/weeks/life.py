"""The life of one service, or of some that share nodes, over two weeks: they come up, things befall them, all is
mended, they are deleted one after the other.

What holds at the end: a service that nothing troubles any more serves, sleeps or is suspended as its spec says; at rest
nobody writes, an operator that has just started neither; a service that is deleted leaves nothing behind, and
the others as they are.
Knows nothing of how histories are chosen.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.weeks import checks
from tests.operator.weeks.events import EVENTS, OFFICE
from tests.operator.weeks.store import service_of
from tests.operator.weeks.tenants import Tenant
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
# Who shares the nodes with it: of a pod with two GPUs, and of two pods that its owner wants at any time.
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pair", {"model": {"uri": "hf://org/model-1"}, "resources": {"gpus": 2, "memory": "4Gi"},
              "parallelism": {"tensor": 2}, "runtime": {"args": ["--seed", "1"]}, "cache": {"retain": "24h"}}),
    ("lone", {"model": {"uri": "hf://org/model-2"}, "resources": {"gpus": 1, "memory": "4Gi"},
              "runtime": {"args": ["--seed", "1"]}, "cache": {"retain": "24h"}, "replicas": 2}),
)  # fmt: skip
# Of each node, by the number of services: there is one to spare in quiet hours, and too few in others.
GPUS = {1: 2, 2: 2, 3: 3}
WEEKS = timedelta(weeks=2)
QUIET_SECONDS = 2 * 3600
TRAFFIC_SECONDS = 3600

# Writes an hour where nothing befalls: a schedule's pods that come and go, look-ups of what is followed.
MOST_WRITES = 400


class Life:
    """Use `begin`, then `step` as often as wanted, then `end`; of so many `services`."""

    def __init__(self, services: int = 1) -> None:
        self.world = World()
        self._specs = (("demo", GOOD), *OTHERS)[:services]

    async def begin(self) -> None:
        """Two nodes; the services are made, and serve."""
        for name in ("a", "b"):
            self.world.machines.add(name, GPUS[len(self._specs)])
        for name, spec in self._specs:
            self.world.make(name, spec)
        await self.world.pass_by(300)
        for tenant in self.world.tenants.values():
            ready = condition(tenant.service, "Ready")
            assert ready["status"] == "True", f"{tenant.name} does not come up: {ready['message']}"

    async def step(self, what: str, n: int, gap: int, who: int = 0) -> None:
        """Something befalls one of them, and so many seconds pass."""
        tenant = [*self.world.tenants.values()][who % len(self.world.tenants)]
        self.world.said.append(f"--- {self.world.time:%d. %H:%M:%S} {tenant.name}: {what} {n}, then {gap} s")
        EVENTS[what](tenant, n)
        await self.world.pass_by(min(gap, TRAFFIC_SECONDS))
        if gap > TRAFFIC_SECONDS:
            self._quiet()
            await self.world.pass_by(gap - TRAFFIC_SECONDS)

    def _quiet(self) -> None:
        """Clients go home, and sources answer: what fails for days is tried again every ten minutes, for days."""
        self.world.machines.fetch_fails = ""
        self.world.controllers.loads.clear()
        for tenant in self.world.tenants.values():
            tenant.traffic.turn(False)

    async def end(self) -> None:
        """The rest of the two weeks, and what must hold then."""
        self._quiet()
        left = BEGIN + WEEKS - self.world.time
        written = len(self.world.store.writes)
        if left > timedelta():
            await self.world.pass_by(left.total_seconds())
            most = (100 + MOST_WRITES * left.total_seconds() / 3600) * len(self._specs)
            assert len(self.world.store.writes) - written < most, f"it writes for ever: {self.world.store.writes[-12:]}"
        await self._mended()
        for tenant in self.world.tenants.values():
            await self._deleted(tenant)
        await self.world.pass_by(26 * 3600)
        kept = self.world.store.everything()
        assert not kept, f"volumes that nobody ends: {checks.names(kept)}"

    async def _mended(self) -> None:
        """Nodes, source and operator are well again, and so are the specs; there are GPUs for all that may be asked."""
        world = self.world
        world.said.append("--- mended")
        for name in [*world.machines.nodes]:
            world.machines.come_back(name)
        for name in ("a", "b"):
            if name not in world.machines.nodes:
                world.machines.add(name, 2)
        if len(world.tenants) > 1:
            world.machines.add("large", 8)
        world.machines.fetch_fails, world.store.dies_before, world.store.refuses = "", None, 0
        world.skew, world.holders.addresses = timedelta(), ("10.99.0.7",)
        seed = ["--seed", "1000003"]  # of no kind that fails
        for tenant in world.tenants.values():
            tenant.change(runtime={"args": seed, "image": None}, canary=None, rollout=None, suspend=False)
            if not tenant.service["spec"].get("autoscaling"):
                tenant.change(replicas=2)
        await world.pass_by(QUIET_SECONDS)
        for tenant in world.tenants.values():
            ready = condition(tenant.service, "Ready")
            well = ready["reason"] in ("Serving", "Asleep", "ScaledToZero")
            assert well, f"{tenant.name}: {ready['reason']}: {ready['message']}"
        await self._rests()

    async def _rests(self) -> None:
        """Nobody has anything left to do, an operator that has just started neither."""
        world = self.world
        for tenant in world.tenants.values():
            checks.at_rest(tenant)
        written = len(world.store.writes)
        world.take_over()
        await world.pass_by(0)
        assert len(world.store.writes) == written, f"a new operator writes {world.store.writes[written:]}"

    async def _deleted(self, tenant: Tenant) -> None:
        """It leaves nothing, but for volumes that are to be retained, and those as long as they are; what the others
        have stays as it is.
        """
        world = self.world
        world.said.append(f"--- {tenant.name} is deleted")
        # Those of which nobody but their owner sets the number.
        there = [each for each in world.tenants.values() if each is not tenant and each.there is not None]
        others = [each for each in there if not each.service["spec"].get("autoscaling")]
        had = {pod["metadata"]["uid"] for each in others for pod in checks.answering(each)}
        world.store.forget(tenant.service)
        await world.pass_by(120 if there else QUIET_SECONDS)
        ours = [item for item in world.store.everything() if service_of(item) == tenant.name]
        left = [item for item in ours if item["kind"] != kinds.CLAIM.kind]
        assert not left, f"left behind: {[(item['kind'], item['metadata']['name']) for item in left]}"
        has = {pod["metadata"]["uid"] for each in others for pod in checks.answering(each)}
        assert had <= has, f"pods of others went with {tenant.name}"
