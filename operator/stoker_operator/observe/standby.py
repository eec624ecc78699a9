"""What a replica knows before it leads: all that a reconcile reads, listed and watched, so that it acts at once when
the leader is gone.

Invariants: nothing is written, and nobody is told of anything, before `take_up`; from then on every event is told, and
every service is looked at once, those whose spec nobody has looked at before all others.
Knows nothing of who leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from stoker_operator import metrics
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import ENDPOINT_SLICE
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.cache import services_of
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.observe import kinds_read
from stoker_operator.settings import Settings

log = logging.getLogger("stoker.operator")
AGAIN_SECONDS = 5.0
# A change of one child brings others with it, as a pod that becomes ready does a ReplicaSet and a Deployment: after so
# long they are looked at together.
CHILD_SECONDS = 0.1


class Add(Protocol):
    """As WorkQueue.add."""

    async def __call__(self, key: Key, after: float = 0.0, *, routine: bool = False) -> None: ...


class Standby:
    """A mirror that is filled before anybody asks for what is in it, from when it is made in an event loop."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self.mirror = Mirror(cluster, settings.namespaces, self._child_changed, self._service_changed)
        off = () if settings.activator_service else (ENDPOINT_SLICE.kind,)
        self._without = frozenset((*settings.without, *off))
        self._add: Add | None = None
        self._filling = asyncio.create_task(self._fill())

    async def filled(self) -> None:
        """Wait until every kind that a reconcile reads is listed and followed."""
        await asyncio.shield(self._filling)

    async def stop(self) -> None:
        """Read and watch no more."""
        self._filling.cancel()
        await asyncio.gather(self._filling, self.mirror.stop(), return_exceptions=True)

    async def take_up(self, add: Add) -> None:
        """Tell `add` of every event from now on, and of every service now."""
        self._add = add
        async for service in self.mirror.each(kinds.INFERENCE_SERVICE):
            meta, looked_at = service["metadata"], (service.get("status") or {}).get("observedGeneration")
            await add((meta["namespace"], meta["name"]), routine=looked_at == meta["generation"])

    async def _fill(self) -> None:
        """List and follow the kinds; an API server that refuses is asked again."""
        while True:
            try:
                for kind in (kinds.INFERENCE_SERVICE, *await kinds_read(self.mirror, self._without), kinds.CLAIM):
                    await self.mirror.follow(kind)
                metrics.FILLED.set(1)
                return
            except ApiError as error:
                log.warning("listing: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _child_changed(self, meta: Mapping[str, Any]) -> None:
        if self._add is not None:
            for name in services_of(meta):
                await self._add((meta["namespace"], name), CHILD_SECONDS)

    async def _service_changed(self, meta: Mapping[str, Any]) -> None:
        if self._add is not None:
            await self._add((meta["namespace"], meta["name"]))
