"""kopf's part: every event of a service or of a child enqueues (namespace, name), and nothing else.

Invariants: only `on.event` handlers, which write nothing: no finalizers, no progress, no diff base on any
object; a child's event is told to the server-side label filter, so other people's objects are never
streamed to us.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from stoker_operator import cluster as kinds
from stoker_operator.manifests.cache import USER_PREFIX
from stoker_operator.manifests.identity import INSTANCE, MANAGED_BY
from stoker_operator.queue import Key
from stoker_operator.spec import GROUP, KIND, PLURAL, VERSION

WATCHED = (
    kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.CLAIM, kinds.DEPLOYMENT, kinds.POD, kinds.JOB, kinds.DISRUPTION_BUDGET,
    kinds.AUTOSCALER, kinds.NETWORK_POLICY, kinds.INGRESS,
)  # fmt: skip


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
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 15
    # Unused as long as there are only event handlers; if one is ever added, its state stays under our own
    # prefix.
    chosen.persistence.finalizer = f"{GROUP}/operator"
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"operator.{GROUP}")
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"operator.{GROUP}")
    for kind in WATCHED:
        chosen.watching.label_selectors[kopf_name(kind)] = f"{MANAGED_BY}=stoker"
    return chosen


def kopf_name(kind: kinds.Kind) -> tuple[str, str, str]:
    """A kind as kopf's selectors name it: (group, version, plural)."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


def registry(enqueue: Callable[[Key], Awaitable[None]]) -> kopf.OperatorRegistry:
    """The handlers, each of which calls `enqueue` with the key of the service concerned."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**context: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def service_changed(namespace: str | None, name: str, **_: Any) -> None:
        await enqueue((namespace or "", name))

    async def child_changed(namespace: str | None, meta: Any, **_: Any) -> None:
        for key in owners(namespace or "", meta):
            await enqueue(key)

    for kind in WATCHED:
        kopf.on.event(*kopf_name(kind), registry=handlers, id=f"{kind.plural}_changed")(child_changed)
    return handlers


def owners(namespace: str, meta: Any) -> set[Key]:
    """The services that a child belongs to: by its owner references, by its label where it has another owner, and by
    the users that a cache volume names.
    """
    names = {key.removeprefix(USER_PREFIX) for key in meta.get("annotations") or {} if key.startswith(USER_PREFIX)}
    names |= {item["name"] for item in meta.get("ownerReferences") or () if item["kind"] == KIND}
    instance = (meta.get("labels") or {}).get(INSTANCE)
    return {(namespace, name) for name in names | ({instance} if instance else set())}
