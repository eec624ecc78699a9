"""Asks the pods that are said to be ready whether they answer, since nothing else tells of an engine that died under a
kubelet that hangs.

Invariants: a service is only enqueued when one of its pods falls silent, answers again, or says another thing, so
services at rest cost a request a pod and no reconcile; so many pods are asked at once, and in a second, at most: beyond
a thousand a round takes longer.
Knows nothing of what follows from an answer: the reconcile asks again for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.manifests.canary import COMPONENT_NAME
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.pod_http import PodClient, pod_address
from stoker_operator.observe.rollout import is_ready, is_terminating

EVERY_SECONDS = 10.0
A_SECOND = 100
_AT_ONCE = 32
Key = tuple[str, str]


class Pulse:
    """Follows the ready engine pods that `mirror` knows; `enqueue` is told whose pods say another thing, or nothing."""

    def __init__(self, mirror: Mirror, pods: PodClient, enqueue: Callable[[Key], Awaitable[None]]) -> None:
        self._mirror, self._pods, self._enqueue = mirror, pods, enqueue
        self._words: dict[str, str | None] = {}

    async def run(self) -> None:
        """Ask round after round until cancelled."""
        while True:
            begun = time.monotonic()
            await self.ask_all()
            await asyncio.sleep(max(begun + EVERY_SECONDS - time.monotonic(), 1.0))

    async def ask_all(self) -> None:
        """Ask every pod once."""
        before, self._words = self._words, {}
        pods: list[Mapping[str, Any]] = []
        async for pod in self._mirror.each(kinds.POD):
            if not _counts(pod):
                continue
            pods.append(pod)
            if len(pods) == _AT_ONCE:
                await self._ask_some(pods, before)
                pods = []
        await self._ask_some(pods, before)

    async def _ask_some(self, pods: Sequence[Mapping[str, Any]], before: Mapping[str, str | None]) -> None:
        """Ask a few, tell whose words are others than `before`, and wait until the next ones may be asked."""
        addresses = {pod["metadata"]["uid"]: pod_address(pod, "http") for pod in pods}
        reached = {uid: address for uid, address in addresses.items() if address is not None}
        words = dict(zip(reached, await self._pods.words(list(reached.values())), strict=True))
        for meta in (pod["metadata"] for pod in pods):
            word = words.get(meta["uid"], "")  # nobody could be reached yet at one without an address
            self._words[meta["uid"]] = word
            if word != before.get(meta["uid"], ""):
                await self._enqueue((meta["namespace"], meta["labels"][INSTANCE]))
        await asyncio.sleep(len(pods) / A_SECOND)


def _counts(pod: Mapping[str, Any]) -> bool:
    labels = pod["metadata"].get("labels") or {}
    serves = labels.get(COMPONENT) in ("engine", COMPONENT_NAME) and INSTANCE in labels
    return serves and is_ready(pod) and not is_terminating(pod)
