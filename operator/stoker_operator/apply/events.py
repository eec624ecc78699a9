"""Writes events on services.

Invariants: a refusal is logged, since events are not state; an event is only written with an action or with a change of
Ready's reason, so a reconcile that changes nothing writes none.
Knows nothing of why; what is told comes with its sentence.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.identity import FIELD_MANAGER

log = logging.getLogger("stoker.operator")


def service_key(service: Mapping[str, Any]) -> tuple[str, str]:
    """(namespace, name), as logs name a service."""
    return service["metadata"]["namespace"], service["metadata"]["name"]


async def record_event(cluster: Cluster, service: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
    """Write an event on the service; `kind` is Normal or Warning."""
    meta, now = service["metadata"], datetime.now(UTC)
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        # Named here, so that one whose answer was lost on the way is not told twice when it is sent again.
        "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": service["apiVersion"],
            "kind": service["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "count": 1,
        "firstTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lastTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": "stoker.dev/operator",
        "reportingInstance": FIELD_MANAGER,
    }
    try:
        await cluster.create(kinds.EVENT, event)
    except ApiError as error:
        if error.reason == "AlreadyExists":
            return
        log.warning("%s/%s: event %s was not recorded: %s", *service_key(service), reason, error)


class Telling:
    """Writes events on one service beside whatever else is written: `async with` it, and all are written at its end.

    Whoever is cancelled in it, as a replica that may not write any more, writes none after that.
    """

    def __init__(self, cluster: Cluster, service: Mapping[str, Any]) -> None:
        self._cluster, self._service = cluster, service
        self._tasks: list[asyncio.Task[None]] = []

    def tell(self, kind: str, reason: str, message: str) -> None:
        """As `record_event`, from now on."""
        event = record_event(self._cluster, self._service, kind, reason, message)
        self._tasks.append(asyncio.create_task(event))

    async def __aenter__(self) -> Telling:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or isinstance(error, Exception):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
