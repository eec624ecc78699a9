"""Changes at a steady rate: so many services a second get another disruption budget, none of their pods changes.

Invariants: a change is taken up when the status says that its generation was looked at; it is timed from the answer to
its own write.
Knows nothing of the operator's processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from e2e.scale.services import NAMESPACES

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster

# Who writes the changes, to the API server.
_MANAGER = "scale"
_AT_ONCE = 16


@dataclass
class Changes:
    """`asked` are the generations by service that changes made, with their moments; `took` the seconds until each was
    taken up. `behind`: seconds that the last change came late, for the API server took its time.
    """

    asked: dict[str, tuple[int, float]] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)
    behind: float = 0.0

    def see(self, name: str, looked_at: int) -> None:
        """A status tells that a generation was looked at."""
        generation, since = self.asked.get(name, (0, 0.0))
        if generation and looked_at >= generation:
            del self.asked[name]
            self.took.append(time.monotonic() - since)

    def quantile(self, share: float) -> float:
        """So long the changes took, in seconds, in this share of them; 0 of none."""
        return sorted(self.took)[int(share * (len(self.took) - 1))] if self.took else 0.0


@asynccontextmanager
async def followed(cluster: Cluster) -> AsyncIterator[Changes]:
    """Changes whose end is seen while it lasts. All services are listed before: 5,000 cost the API server seconds."""
    changes = Changes()
    following = asyncio.create_task(_follow(cluster, changes, await _listed(cluster, changes)))
    try:
        yield changes
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _listed(cluster: Cluster, changes: Changes) -> str:
    """See all services once → the version from which on to watch them."""
    since = ""
    async for items, version in cluster.pages(kinds.INFERENCE_SERVICE, "", ""):
        since = version
        for item in items:
            changes.see(item["metadata"]["name"], item.get("status", {}).get("observedGeneration", 0))
    return since


async def _follow(cluster: Cluster, changes: Changes, since: str) -> None:
    while True:
        try:
            async for event, item in cluster.watch(kinds.INFERENCE_SERVICE, "", "", since):
                if event != "BOOKMARK":
                    changes.see(item["metadata"]["name"], item.get("status", {}).get("observedGeneration", 0))
        except ApiError:
            pass
        since = await _listed(cluster, changes)


async def change_steadily(cluster: Cluster, changes: Changes, services: int, rate: float, seconds: float) -> None:
    """`rate` changes a second for so long, one service after the other; each service at most once."""
    slots, started = asyncio.Semaphore(_AT_ONCE), time.monotonic()

    async def one(number: int) -> None:
        name, namespace = f"service-{number}", f"scale-{number % NAMESPACES}"
        head = {"apiVersion": kinds.INFERENCE_SERVICE.api_version, "kind": kinds.INFERENCE_SERVICE.kind}
        spec = {"disruption": {"maxUnavailable": 2 + int(started) % 900}}
        body = head | {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
        async with slots:
            answer = await cluster.apply(kinds.INFERENCE_SERVICE, body, manager=_MANAGER)
            changes.asked[name] = (answer["metadata"]["generation"], time.monotonic())
        changes.behind = time.monotonic() - started - number / rate

    count = min(services, round(rate * seconds))
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
            group.create_task(one(number))
