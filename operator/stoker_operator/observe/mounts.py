"""Follows which serving pods cannot have their API keys mounted anew: the Secret was deleted, or lost its key.

Such a pod goes on with the keys that it has, and neither it nor its status says a word; only its kubelet writes events,
every minute or two. Reading Secrets would tell sooner, and is no right that the operator has.
Invariants: one list of events a namespace that is watched, once a minute, and none while no pod has keys; a service is
only enqueued when what is said of its pods changes; what no event repeats for ten minutes is over.
Knows nothing of what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError
from stoker_operator.manifests.identity import INSTANCE
from stoker_operator.manifests.workload import KEYS_VOLUME
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.rollout import is_ready, is_terminating

log = logging.getLogger("stoker.operator")
EVERY_SECONDS = 60.0
# The kubelet's own limit lets one event of a kind through in five minutes, after the first.
_OVER = timedelta(minutes=10)
_REASON = "FailedMount"
Key = tuple[str, str]
Object = Mapping[str, Any]


class Mounts:
    """Asks for events of the pods that `mirror` knows; `enqueue` is told whose keys cannot be read, or can again."""

    def __init__(self, mirror: Mirror, namespaces: Iterable[str], enqueue: Callable[[Key], Awaitable[None]]) -> None:
        self._mirror, self._namespaces, self._enqueue = mirror, tuple(namespaces) or ("",), enqueue
        self._failed: dict[str, str] = {}
        self._owners: dict[str, Key] = {}

    def failed(self) -> Mapping[str, str]:
        """The kubelet's words for the pods concerned, by uid."""
        return self._failed

    async def run(self) -> None:
        """Look round after round until cancelled."""
        while True:
            try:
                await self.look(datetime.now(UTC))
            except ApiError as error:
                log.warning("events of pods: %s", error)
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self, now: datetime) -> None:
        """Look once. Raises ApiError."""
        pods = {pod["metadata"]["uid"]: pod["metadata"] async for pod in self._mirror.each(kinds.POD) if _has_keys(pod)}
        events = []
        for namespace in self._namespaces if pods else ():
            events += await self._mirror.events_of_pods(namespace, _REASON)
        found = {}
        for event in sorted(events, key=_last):
            uid, words = event["involvedObject"].get("uid", ""), str(event.get("message", ""))
            if uid in pods and f'"{KEYS_VOLUME}"' in words and _last(event) > now - _OVER:
                found[uid] = words.partition(" : ")[2] or words
        changed = {uid for uid in {*found, *self._failed} if found.get(uid) != self._failed.get(uid)}
        owners = {uid: (meta["namespace"], meta["labels"][INSTANCE]) for uid, meta in pods.items()} | self._owners
        self._failed = found
        self._owners = {uid: owners[uid] for uid in found}
        for key in {owners[uid] for uid in changed}:
            await self._enqueue(key)


def _has_keys(pod: Object) -> bool:
    named = any(volume["name"] == KEYS_VOLUME for volume in pod["spec"].get("volumes") or ())
    ours = INSTANCE in (pod["metadata"].get("labels") or {})
    return named and ours and is_ready(pod) and not is_terminating(pod)


def _last(event: Object) -> datetime:
    """When an event was last repeated."""
    series = event.get("series") or {}
    stamps = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    made = event["metadata"].get("creationTimestamp")
    return max(datetime.fromisoformat(stamp) for stamp in (*stamps, made) if stamp)
