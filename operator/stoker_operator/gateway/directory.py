"""Follows the Services and EndpointSlices of a cluster that the operator made, and tells when they say something else.

Invariants: nothing is told before everything was read once; what a watch missed is seen at the next look.
Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import ENDPOINT_SLICE, SERVICE
from stoker_operator.gateway.models import Backend, read_backends
from stoker_operator.manifests.identity import OURS
from stoker_operator.observe.mirror import Mirror

log = logging.getLogger("stoker.gateway")
# A watch that ended for good is begun anew at the next look.
RESYNC_SECONDS, FIRST_SECONDS = 15.0, 1.0


class Directory:
    """`changed` is set whenever something may be another; `synced`, once everything is known."""

    def __init__(self, cluster: Cluster, namespaces: Iterable[str]) -> None:
        self._namespaces = tuple(namespaces)
        self._mirror = Mirror(cluster, self._namespaces, self._note)
        self.changed = asyncio.Event()
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                try:
                    for kind in (SERVICE, ENDPOINT_SLICE):
                        await self._mirror.list_all(kind, self._namespaces[0] if self._namespaces else "default", OURS)
                    self.synced.set()
                    self.changed.set()
                except ApiError as error:
                    log.warning("the API server does not tell of services: %s", error)
                await asyncio.sleep(RESYNC_SECONDS if self.synced.is_set() else FIRST_SECONDS)
        finally:
            await self._mirror.stop()

    def backends(self) -> tuple[Backend, ...]:
        """The services as they are now, the oldest first."""
        return read_backends(self._mirror.known(SERVICE), self._mirror.known(ENDPOINT_SLICE))

    async def _note(self, _: Mapping[str, Any]) -> None:
        self.changed.set()
