"""Who holds requests for services that sleep: the addresses of the activator's pods.

Invariants: a pod that is not ready, or is on its way out, is none of them; when they change, every service that has
asked for one is looked at again, since its address leads to them. While the API server does not answer, they stay.
Knows nothing of how requests are held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.activation import COMPONENT_NAME, SERVICE_LABEL, slice_addresses, slice_port
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.observe.mirror import Mirror

log = logging.getLogger("stoker.operator")
EVERY_SECONDS = 2.0


class Activators:
    """Follows the endpoints of Service `service` in `namespace`; `enqueue` is told whom a change concerns.

    `addresses` is None before the first look.
    """

    def __init__(
        self,
        cluster: Cluster,
        mirror: Mirror,
        namespace: str,
        service: str,
        enqueue: Callable[[Key], Awaitable[None]],
    ) -> None:
        self._cluster, self._mirror, self._enqueue = cluster, mirror, enqueue
        self._namespace, self._service = namespace, service
        self.addresses: tuple[str, ...] | None = None

    async def run(self) -> None:
        """Look every now and then until cancelled."""
        while True:
            try:
                await self.look()
            except ApiError as error:
                log.warning("activator: %s", error)
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> None:
        """Look once. Raises ApiError."""
        selector = f"{SERVICE_LABEL}={self._service}"
        slices = await self._cluster.list_all(kinds.ENDPOINT_SLICE, self._namespace, selector)
        found = tuple(sorted({address for each in slices for address in slice_addresses(each)}))
        if found == self.addresses:
            return
        log.info("activator: requests are held by %s", ", ".join(found) or "nobody")
        self.addresses = found
        for key in self.ports():
            await self._enqueue(key)

    def ports(self) -> dict[Key, int]:
        """The ports that services have, as the cluster holds them."""
        found = {}
        for each in self._mirror.known(kinds.ENDPOINT_SLICE):
            meta = each["metadata"]
            # Kubernetes' own slices carry the labels of their Service.
            if meta["labels"].get(COMPONENT) == COMPONENT_NAME:
                found[meta["namespace"], str(meta["labels"][INSTANCE])] = slice_port(each)
        return found
