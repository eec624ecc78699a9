"""Asks the operator to wake a service: one write into the status of its InferenceService, which names the sleep to end.

Invariants: a sleep is asked to end once; what the API server refuses is tried again for as long as it may help. The
operator decides: all that this process may write anywhere is that wish.
Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging

from stoker_operator import metrics
from stoker_operator.activator.directory import Sleeper
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import INFERENCE_SERVICE
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.activation import WAKING

log = logging.getLogger("stoker.activator")
MANAGER = "stoker-activator"
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 5.0
_LONGEST = 200


class Waker:
    """Asks through `cluster`; `close` ends what it still tries."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked: dict[Key, str] = {}
        self._wanted: dict[Key, tuple[str, str]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def call(self, sleeper: Sleeper, what: str) -> None:
        """Somebody waits for a pod of this service, with a request that is `what` in words."""
        sleep = sleeper.sleep
        if not sleep.name or sleep.state == WAKING or self._asked.get(sleeper.key) == sleep.name:
            return
        self._wanted[sleeper.key] = (sleep.name, what[:_LONGEST])
        if sleeper.key not in self._tasks:
            self._tasks[sleeper.key] = asyncio.create_task(self._ask(sleeper.key))

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._wanted.pop(key, None)
        self._asked.pop(key, None)

    async def close(self) -> None:
        """End what is tried."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: Key) -> None:
        """Until what was wanted last is asked for."""
        backoff = FIRST_BACKOFF_SECONDS
        try:
            while (wanted := self._wanted.get(key)) is not None and self._asked.get(key) != wanted[0]:
                try:
                    await self._write(key, *wanted)
                except ApiError as error:
                    log.warning("%s/%s: it cannot be asked to wake: %s", *key, error)
                    if error.status == 404:
                        return
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)
                    continue
                self._asked[key] = wanted[0]
                metrics.ACTIVATOR_WAKES.labels(*key).inc()
                log.info("%s/%s: asked to wake by %s", *key, wanted[1])
        finally:
            self._tasks.pop(key, None)

    async def _write(self, key: Key, sleep: str, what: str) -> None:
        manifest = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "metadata": {"namespace": key[0], "name": key[1]},
            "status": {"wake": {"sleep": sleep, "by": what}},
        }
        await self._cluster.apply(INFERENCE_SERVICE, manifest, subresource="status", manager=MANAGER)
