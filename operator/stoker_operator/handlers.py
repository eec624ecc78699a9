"""Which events lead to which reconcile: kopf tells of the services, the mirror of their children.

Invariants: an event enqueues (namespace, name), and nothing else; only an `on.event` handler, which writes nothing: no
finalizers, no progress, no diff base on any object.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from stoker_operator.cluster.api import PAGE_ITEMS
from stoker_operator.cluster.queue import Key
from stoker_operator.spec.service import GROUP, PLURAL, VERSION


class _NothingKept(kopf.DiffBaseStorage):
    """What kopf compares events with: nothing. It would copy each object whole, to tell what changed to nobody."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """An essence without anything."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """The same essence."""
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing."""


def settings() -> kopf.OperatorSettings:
    """kopf's settings: no peering, no event posting, watches that end and start again, nothing stored on
    objects.
    """
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    # A watch can freeze without an error: no stream lives longer than this, and silence is noticed.
    chosen.watching.server_timeout = 240
    chosen.watching.client_timeout = 300
    chosen.watching.connect_timeout = 15
    chosen.watching.reconnect_backoff = 1.0
    # Else all services are parsed at once: of 5,000 that would be more than all else that the operator holds.
    chosen.watching.chunk_size = PAGE_ITEMS
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 15
    # Unused as long as there are only event handlers; if one is ever added, its state stays under our own
    # prefix.
    chosen.persistence.finalizer = f"{GROUP}/operator"
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"operator.{GROUP}")
    chosen.persistence.diffbase_storage = _NothingKept()
    return chosen


def registry(
    enqueue: Callable[[Key], Awaitable[None]], news: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> kopf.OperatorRegistry:
    """The handlers, each of which calls `enqueue` with the key of the service concerned, where `news` says that nobody
    knew the object like this: what we just wrote ourselves comes back as an event.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**context: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    def tells(event: kopf.RawEvent, **_: Any) -> bool:
        return event["type"] == "DELETED" or news(event["object"])

    # Most events are no news, and what kopf does for a handler is more than to ask whether they are.
    @kopf.on.event(GROUP, VERSION, PLURAL, when=tells, registry=handlers)
    async def service_changed(namespace: str | None, name: str, **_: Any) -> None:
        await enqueue((namespace or "", name))

    return handlers
