"""Asks the pods that are said to be ready whether they answer, since nothing else tells of an engine that died under a
kubelet that hangs.

Invariants: a service is only enqueued when one of its pods falls silent, answers again, or says another thing, so
services at rest cost a request a pod and no reconcile; so many pods are asked at once at most.
Knows nothing of what follows from an answer: the reconcile asks again for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.pod_http import PodClient, pod_address
from stoker_operator.observe.rollout import is_ready, is_terminating

EVERY_SECONDS = 10.0
_AT_ONCE = 64
Key = tuple[str, str]


class Pulse:
    """Follows the ready engine pods that `mirror` knows; `enqueue` is told whose pods say another thing, or nothing."""

    def __init__(self, mirror: Mirror, pods: PodClient, enqueue: Callable[[Key], Awaitable[None]]) -> None:
        self._mirror, self._pods, self._enqueue = mirror, pods, enqueue
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._words: dict[str, str | None] = {}

    async def run(self) -> None:
        """Ask round after round until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.ask_all()

    async def ask_all(self) -> None:
        """Ask every pod once."""
        pods = [pod for pod in self._mirror.known(kinds.POD) if _counts(pod)]
        words = await asyncio.gather(*map(self._ask, pods))
        before = self._words
        self._words = {pod["metadata"]["uid"]: word for pod, word in zip(pods, words, strict=True)}
        for meta in (pod["metadata"] for pod in pods):
            if self._words[meta["uid"]] != before.get(meta["uid"], ""):
                await self._enqueue((meta["namespace"], meta["labels"][INSTANCE]))

    async def _ask(self, pod: Mapping[str, Any]) -> str | None:
        address = pod_address(pod, "http")
        if address is None:
            return ""  # nobody could be reached there yet
        async with self._slots:
            return await self._pods.word(*address)


def _counts(pod: Mapping[str, Any]) -> bool:
    labels = pod["metadata"].get("labels") or {}
    engine = labels.get(COMPONENT) == "engine" and INSTANCE in labels
    return engine and is_ready(pod) and not is_terminating(pod)
