"""The node cache agent's loop: what pods' claims ask of this node → room, volumes, labels.

    1. look: volumes, disk            3. answer each claim: its copy is whole, or there is room to bring it
    2. take back what nobody claims   4. tell by labels what the node has

Invariants: level-triggered, it may be restarted at any time; one look at a time, so nothing is given up while it is
handed out; a claim that cannot be answered is told why, once, and looked at again.
Knows nothing of where models come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from stoker_operator import metrics
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests.copies import COPY_PREFIX, FULL, SELECTED_NODE, SERVED, copy_label
from stoker_operator.manifests.identity import OURS
from stoker_operator.node_cache.disk import Disk
from stoker_operator.node_cache.room import Bounds, Stored, give_up
from stoker_operator.node_cache.settings import NodeCacheSettings
from stoker_operator.node_cache.wishes import Lent, Wish, mine, pod_of, read_lent, read_wish, volume
from stoker_operator.observe.mirror import Mirror
from stoker_operator.spec.quantity import human_bytes

log = logging.getLogger("stoker.node-cache")
FIELD_MANAGER = "stoker-node-cache"
# While something waits, or is being brought: nothing tells when a fetch has published.
WAITING_SECONDS = 2.0
# A look asks the API server some dozen times, each answered or given up within half a minute, and walks a disk.
HANGING_SECONDS = 900.0
Object = Mapping[str, Any]


class Agent:
    """One node's. `run` it until cancelled."""

    def __init__(self, cluster: Cluster, settings: NodeCacheSettings, disk: Disk) -> None:
        self._cluster = cluster
        self._settings = settings
        self._disk = disk
        self._mirror = Mirror(cluster, (), self._claim_changed)
        self._changed = asyncio.Event()
        self._looking_since: float | None = None
        self.synced = False

    def hangs(self) -> bool:
        """Whether a look has been under way for longer than any can take."""
        return self._looking_since is not None and time.monotonic() - self._looking_since > HANGING_SECONDS

    async def run(self) -> None:
        """Look again and again; an API server that does not answer, and a disk that fails, are tried again."""
        try:
            while True:
                waiting = False
                self._looking_since = time.monotonic()
                try:
                    waiting = await self.look()
                    self.synced = True
                except (ApiError, OSError) as error:
                    log.warning("the look was not finished: %s", error)
                self._looking_since = None
                seconds = WAITING_SECONDS if waiting or not self.synced else self._settings.look_seconds
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the watch of claims."""
        await self._mirror.stop()

    async def look(self) -> bool:
        """Do what is to be done now; whether something waits or is being brought. Raises ApiError, OSError."""
        node = await self._cluster.get(kinds.NODE, "", self._settings.node)
        if node is None:
            raise OSError(f"there is no node {self._settings.node}")
        claims = await self._claims()
        lent = await self._taken_back(claims)
        for each in lent:
            if each.digest:
                await asyncio.to_thread(self._disk.touch, each.folder, each.digest)
        wishes = [wish for claim in claims.values() if (wish := self._wish(claim)) is not None]
        asked = {each.claim[2] for each in lent}
        for wish in sorted(wishes, key=lambda wish: (wish.fills, wish.bytes)):
            if wish.claim["metadata"]["uid"] not in asked:
                lent += await self._answer(wish, node, lent)
        stored = await asyncio.to_thread(self._disk.stored)
        await self._tell(node, stored)
        metrics.NODE_CACHE_BYTES.set(sum(item.bytes for item in stored))
        metrics.NODE_CACHE_COPIES.set(sum(bool(item.digest) for item in stored))
        return bool(wishes) or any(each.fills for each in lent)

    async def _claims(self) -> dict[str, Object]:
        """Every claim of Stoker's, by uid."""
        await self._mirror.list_all(kinds.CLAIM, "default", OURS)
        return {str(claim["metadata"]["uid"]): claim for claim in self._mirror.known(kinds.CLAIM)}

    def _wish(self, claim: Object) -> Wish | None:
        return read_wish(claim, self._settings.node, self._settings.storage_class)

    async def _claim_changed(self, meta: Mapping[str, Any]) -> None:
        if (meta.get("annotations") or {}).get(SELECTED_NODE) == self._settings.node:
            self._changed.set()

    async def _taken_back(self, claims: Mapping[str, Object]) -> list[Lent]:
        """The volumes that are lent out; those whose claim is gone are ended."""
        kept = []
        for found in await self._cluster.list_all(kinds.VOLUME, "", mine(self._settings.node)):
            lent = read_lent(found)
            namespace, name, uid = lent.claim
            there = uid in claims
            if not there:
                claim = await self._cluster.get(kinds.CLAIM, namespace, name)
                there = claim is not None and claim["metadata"]["uid"] == uid
            if there and "deletionTimestamp" not in found["metadata"]:
                kept.append(lent)
            elif not there and "deletionTimestamp" not in found["metadata"]:
                log.info("volume %s: claim %s/%s is gone", found["metadata"]["name"], namespace, name)
                await self._cluster.delete(kinds.VOLUME, "", found["metadata"]["name"], found["metadata"]["uid"])
        return kept

    async def _answer(self, wish: Wish, node: Object, lent: list[Lent]) -> list[Lent]:
        """Serve a claim, or tell it why not; the volume that was made, if one was."""
        folder = await self._folder(wish.namespace)
        there = bool(wish.digest) and await asyncio.to_thread(self._disk.has, folder, wish.digest)
        if not wish.fills and not there:
            return []
        if wish.fills and not there and not await self._make_room(wish, folder, lent):
            return []
        place = await asyncio.to_thread(self._disk.open, folder)
        manifest = volume(wish, node, place, self._settings.storage_class)
        made = await self._cluster.apply(kinds.VOLUME, manifest, manager=FIELD_MANAGER)
        log.info("claim %s/%s has volume %s", wish.namespace, wish.name, manifest["metadata"]["name"])
        return [read_lent(made)]

    async def _folder(self, namespace: str) -> str:
        """The name of a namespace's folder, which ends with the namespace."""
        found = await self._cluster.get(kinds.NAMESPACE, "", namespace)
        if found is None:
            raise OSError(f"namespace {namespace} is gone")
        return f"{namespace}.{found['metadata']['uid']}"

    async def _make_room(self, wish: Wish, folder: str, lent: list[Lent]) -> bool:
        """Give up what must be for what a pod is to bring; whether it fits then."""
        stored = await asyncio.to_thread(self._disk.stored)
        promised, filling = await self._promised(lent)
        if (folder, wish.source) in promised:
            return True  # another try of the same fetch has the room
        bounds = Bounds(self._settings.limit_bytes, await asyncio.to_thread(self._disk.free), sum(promised.values()))
        held = frozenset(
            (item.folder, item.name)
            for item in stored
            if (item.digest and any(each.folder == item.folder and each.digest == item.digest for each in lent))
            or (not item.digest and item.folder in filling)
        )
        chosen = give_up(stored, held, wish.bytes, bounds)
        if chosen is None:
            await self._tell_full(wish, sum(item.bytes for item in stored), bounds)
            return False
        for item in chosen:
            log.info("giving up %s/%s, %s", item.folder, item.name, human_bytes(item.bytes))
            await asyncio.to_thread(self._disk.remove, item)
            metrics.NODE_CACHE_GIVEN_UP.inc()
        return True

    async def _promised(self, lent: list[Lent]) -> tuple[dict[tuple[str, str], int], set[str]]:
        """(bytes promised to fetches that are not over yet, by folder and source; the folders with a fetch)."""
        fillers = sorted((each for each in lent if each.fills), key=lambda each: each.made)
        promised = {(each.folder, each.source): each.bytes for each in sorted(fillers, key=lambda each: each.bytes)}
        # The latest try decides: those that failed before it are there as long as their Job is.
        for key, each in {(each.folder, each.source): each for each in fillers}.items():
            there = bool(each.digest) and await asyncio.to_thread(self._disk.has, each.folder, each.digest)
            if there or await self._is_over(each):
                del promised[key]
        return promised, {each.folder for each in fillers}

    async def _is_over(self, lent: Lent) -> bool:
        """Whether the pod that was to bring something has: perhaps nothing, where all of it was there already. One that
        failed is followed by another, which goes on where it was.
        """
        namespace, name, uid = lent.claim
        claim = await self._cluster.get(kinds.CLAIM, namespace, name)
        pod = pod_of(claim) if claim is not None and claim["metadata"]["uid"] == uid else ""
        found = await self._cluster.get(kinds.POD, namespace, pod) if pod else None
        return found is not None and (found.get("status") or {}).get("phase") == "Succeeded"

    async def _tell_full(self, wish: Wish, taken: int, bounds: Bounds) -> None:
        """Say on the claim why it waits: the operator puts it into the service's status."""
        limit, node = self._settings.limit_bytes, self._settings.node
        text = f"Node {node} has no room for {human_bytes(wish.bytes)}: models take {human_bytes(taken)} of "
        text += f"{human_bytes(limit)}"
        # The rest moves all the time, and is said once.
        known = str((wish.claim["metadata"].get("annotations") or {}).get(FULL, ""))
        if known.partition(", its disk")[0] == text:
            return
        text += f", its disk has {human_bytes(max(bounds.free, 0))} free"
        text += f", {human_bytes(bounds.reserved)} are promised to other fetches" if bounds.reserved else ""
        text += ", and pods use what is there. Raise the chart's nodeCache.size, free the disk, or end another service."
        log.warning("claim %s/%s: %s", wish.namespace, wish.name, text)
        patch = {"metadata": {"uid": wish.claim["metadata"]["uid"], "annotations": {FULL: text}}}
        await self._mirror.merge(kinds.CLAIM, wish.namespace, wish.name, patch)

    async def _tell(self, node: Object, stored: list[Stored]) -> None:
        """Label the node with what it has: the scheduler prefers it, and statuses count it."""
        wanted = {SERVED: "true"}
        for item in stored:
            if item.digest:
                wanted[copy_label(item.folder.rpartition(".")[0], item.digest)] = "true"
        there = node["metadata"].get("labels") or {}
        ours = {key: value for key, value in there.items() if key == SERVED or key.startswith(COPY_PREFIX)}
        if ours == wanted:
            return
        labels = {key: None for key in ours if key not in wanted} | wanted
        await self._cluster.merge(kinds.NODE, "", node["metadata"]["name"], {"metadata": {"labels": labels}})
