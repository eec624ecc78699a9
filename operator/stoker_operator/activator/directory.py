"""The services whose requests may come here, as their EndpointSlices tell: port, bounds, sleep, and ready pods.

Invariants: a service is known by the slice that the operator made for it, and by nothing that a request says; its pods
are those that Kubernetes lists as ready behind its Service.
Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import ENDPOINT_SLICE
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.activation import (
    COMPONENT_NAME,
    SERVICE_LABEL,
    Bounds,
    Sleep,
    read_bounds,
    read_sleep,
    slice_addresses,
    slice_port,
)
from stoker_operator.manifests.identity import COMPONENT, INSTANCE, OURS
from stoker_operator.observe.mirror import Mirror

log = logging.getLogger("stoker.activator")
# A watch that ended for good is begun anew at the next look.
RESYNC_SECONDS = 15.0
FIRST_SECONDS = 1.0
Object = Mapping[str, Any]
Pod = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A service that may sleep. `port` is where its requests come in; `pods` are (address, port) of those ready."""

    key: Key
    port: int
    bounds: Bounds
    sleep: Sleep
    pods: tuple[Pod, ...] = field(default=())


def read_sleeper(key: Key, slices: Iterable[Object]) -> Sleeper | None:
    """The service as its slices tell; None where none of them leads here."""
    mine: Object | None = None
    pods: set[Pod] = set()
    for each in slices:
        labels = each["metadata"].get("labels") or {}
        if labels.get(SERVICE_LABEL) != key[1]:
            continue  # of the Service that scrapers use
        if labels.get(COMPONENT) == COMPONENT_NAME:
            mine = each
        else:
            pods |= {(address, slice_port(each)) for address in slice_addresses(each)}
    bounds = read_bounds(mine) if mine is not None else None
    if mine is None or bounds is None or "deletionTimestamp" in mine["metadata"]:
        return None
    return Sleeper(key, slice_port(mine), bounds, read_sleep(mine), tuple(sorted(pods)))


class Directory:
    """Follows the services of a cluster. `changed` is told of each as it is now; None, it is none of ours any more."""

    def __init__(
        self, cluster: Cluster, namespaces: Iterable[str], changed: Callable[[Key, Sleeper | None], None]
    ) -> None:
        self._namespaces = tuple(namespaces)
        self._mirror = Mirror(cluster, self._namespaces, self._slice_changed)
        self._changed = changed
        self._listed = False
        self._told: set[Key] = set()
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                    self.synced.set()
                except ApiError as error:
                    log.warning("the API server does not tell of services: %s", error)
                await asyncio.sleep(RESYNC_SECONDS if self.synced.is_set() else FIRST_SECONDS)
        finally:
            await self._mirror.stop()

    async def _look(self) -> None:
        """Begin the watches, and look at every service once, for what they may have missed."""
        await self._mirror.list_all(ENDPOINT_SLICE, self._namespaces[0] if self._namespaces else "default", OURS)
        self._listed = True
        for key in self._told | {key for each in self._mirror.known(ENDPOINT_SLICE) if (key := _key(each["metadata"]))}:
            await self._tell(key)

    async def _slice_changed(self, meta: Mapping[str, Any]) -> None:
        key = _key(meta)
        # While the first list is read the mirror knows only a part.
        if key is not None and self._listed:
            await self._tell(key)

    async def _tell(self, key: Key) -> None:
        slices = await self._mirror.list_all(ENDPOINT_SLICE, key[0], f"{OURS},{INSTANCE}={key[1]}")
        found = read_sleeper(key, slices)
        if found is not None:
            self._told.add(key)
        elif key not in self._told:
            return
        else:
            self._told.discard(key)
        self._changed(key, found)


def _key(meta: Mapping[str, Any]) -> Key | None:
    instance = (meta.get("labels") or {}).get(INSTANCE)
    return (str(meta["namespace"]), str(instance)) if instance else None
