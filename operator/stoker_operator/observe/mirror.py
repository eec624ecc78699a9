"""The services and their children as watches tell of them, so that a reconcile reads them from memory.

A kind is listed once, when it is first asked for, and followed by a watch from there on. What was written comes back
with the answer to the write and is taken over at once, so nobody reads an older state than he wrote. Events of an
object wait while it is written: what a write did is no news to who wrote it, though a watch tells of it first.
Invariants: what shelf.py says of objects; a watch that broke goes on where it was, and lists again when the API server
has forgotten that place; a watch that ended for good is begun anew by the next reader. A change is told if it is one to
readers: where all that is kept of an object stayed as it was, nobody is.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stoker_operator import metrics
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.cluster.kinds import INFERENCE_SERVICE, Kind
from stoker_operator.manifests.identity import FIELD_MANAGER, INSTANCE, OURS
from stoker_operator.observe.shelf import Packed, Place, Shelf

log = logging.getLogger("stoker.operator")
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
# After so many objects, some milliseconds of work, whoever goes through all of a kind lets everybody else have a turn.
_A_TURN = 32
Changed = Callable[[Mapping[str, Any]], Awaitable[None]]


class Mirror(Cluster):
    """A Cluster that answers for services and the operator's own children from memory; everything else it asks the API
    server.

    `namespaces` empty: all. `changed` is told the metadata of every child that a watch tells of, and `service_changed`
    that of every service; None: nobody is.
    """

    def __init__(
        self, cluster: Cluster, namespaces: Iterable[str], changed: Changed, service_changed: Changed | None = None
    ) -> None:
        self._share(cluster)
        self._namespaces = tuple(namespaces) or ("",)
        self._changed, self._service_changed = changed, service_changed
        self._shelves: dict[str, Shelf] = {}
        self._listing = asyncio.Lock()

    async def stop(self) -> None:
        """End the watches."""
        tasks = [task for shelf in self._shelves.values() for task in shelf.watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """As Cluster's; services come from memory."""
        if kind is not INFERENCE_SERVICE:
            return await super().get(kind, namespace, name)
        shelf = await self._followed(kind)
        return shelf.read((namespace, name)) if (namespace, name) in shelf.entries else None

    async def list_all(self, kind: Kind, namespace: str, selector: str = "") -> list[Object]:
        """As Cluster's; the children of one namespace, or of one service in it, come from memory."""
        ours, _, instance = selector.partition(f",{INSTANCE}=")
        if ours != OURS or not namespace or "," in instance:
            return await super().list_all(kind, namespace, selector)
        return self._of(await self._followed(kind), namespace, instance)

    async def together(self, kinds: Sequence[Kind], namespace: str, selector: str) -> dict[Kind, list[Object]]:
        """As Cluster's, from memory where it is one service's children that are asked for."""
        ours, _, instance = selector.partition(f",{INSTANCE}=")
        if ours != OURS or not namespace or not instance or "," in instance:
            return await super().together(kinds, namespace, selector)
        shelves = [await self._followed(kind) for kind in kinds]
        return {kind: self._of(shelf, namespace, instance) for kind, shelf in zip(kinds, shelves, strict=True)}

    async def concerning(self, kind: Kind, namespace: str, service: str) -> list[Object]:
        """As Cluster's, from memory."""
        shelf = await self._followed(kind)
        return [shelf.read((namespace, name)) for name in sorted(shelf.named.get((namespace, service), ()))]

    async def by_name(self, kind: Kind, namespace: str) -> Mapping[str, Object]:
        """As Cluster's, from memory; each is unpacked when it is asked for, for of many few are."""
        shelf = await self._followed(kind)
        return Packed(shelf, {name: shelf.entries[namespace, name] for name in shelf.inside.get(namespace, ())})

    def _of(self, shelf: Shelf, namespace: str, instance: str) -> list[Object]:
        """The objects that carry the label of an instance, "": all of the namespace."""
        if not instance:
            return [shelf.read((namespace, name)) for name in sorted(shelf.inside.get(namespace, ()))]
        found = [shelf.read((namespace, name)) for name in sorted(shelf.named.get((namespace, instance), ()))]
        return [item for item in found if (item["metadata"].get("labels") or {}).get(INSTANCE) == instance]

    def known(self, kind: Kind) -> Iterator[Object]:
        """The objects of a kind that is followed already, in all namespaces, unpacked one at a time; who takes his time
        sees each as it is then, and none that is gone.
        """
        shelf = self._shelves.get(kind.kind)
        for place in tuple(shelf.entries) if shelf is not None else ():
            if shelf is not None and place in shelf.entries:
                yield shelf.read(place)

    async def each(self, kind: Kind) -> AsyncIterator[Object]:
        """As `known`, with a turn for everybody else now and then: tens of thousands of pods take seconds to unpack."""
        for number, item in enumerate(self.known(kind), start=1):
            yield item
            if number % _A_TURN == 0:
                await asyncio.sleep(0)

    async def apply(
        self, kind: Kind, manifest: Mapping[str, Any], subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """As Cluster's; what came of it is read from then on."""
        meta = manifest["metadata"]
        async with self._written(kind, (meta.get("namespace", ""), meta["name"])):
            return self.take_over(kind, await super().apply(kind, manifest, subresource, manager))

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """As Cluster's; what came of it is read from then on."""
        async with self._written(kind, (namespace, name)):
            return self.take_over(kind, await super().merge(kind, namespace, name, patch))

    def take_over(self, kind: Kind, item: Object) -> Object:
        """Read an object that somebody was given from now on, where its kind is followed and it is news."""
        shelf = self._shelves.get(kind.kind)
        if shelf is not None:
            shelf.put(item)
        return item

    def learn(self, kind: Kind, item: Object) -> bool:
        """As `take_over`, of an object that an event tells of; whether it was news, as all is of a kind that is not
        followed. Where it waits for a write, those are told whom the mirror tells.
        """
        shelf = self._shelves.get(kind.kind)
        return shelf is None or (not shelf.holds("MODIFIED", item) and shelf.put(item))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, foreground: bool = False) -> None:
        """As Cluster's; from then on the object is seen as one that is being deleted."""
        await super().delete(kind, namespace, name, uid, foreground=foreground)
        shelf = self._shelves.get(kind.kind)
        entry = shelf.entries.get((namespace, name)) if shelf is not None else None
        if shelf is not None and entry is not None and entry.uid == uid:
            shelf.being_deleted((namespace, name))

    async def follow(self, kind: Kind) -> None:
        """Have a kind listed and watched before anybody asks for it. Raises ApiError."""
        await self._followed(kind)

    async def _followed(self, kind: Kind) -> Shelf:
        """The kind's objects, with watches running. Raises ApiError when they cannot be listed."""
        shelf = self._shelves.setdefault(kind.kind, Shelf())
        if shelf.is_followed:
            return shelf
        async with shelf.lock:
            if not shelf.is_followed:
                for task in shelf.watches:
                    task.cancel()
                shelf.watches = []
                starts = [(namespace, await self._relist(kind, shelf, namespace)) for namespace in self._namespaces]
                shelf.watches = [asyncio.create_task(self._follow(kind, shelf, *start)) for start in starts]
        return shelf

    async def _relist(self, kind: Kind, shelf: Shelf, namespace: str, since: str = "0") -> str:
        """Bring the shelf in line with a list; the resourceVersion of that. Whoever is concerned is told.

        `since` is how far a watch had come: an API server that has not come so far was set back to an earlier state.
        """
        there: set[str] = set()
        version = since
        # One list at a time, and a page of it: what is parsed is ten times the size of what is kept.
        async with self._listing:
            async for items, version in self.pages(kind, namespace, _chosen(kind)):
                if not there and int(version) < int(since):
                    log.warning("%s: the API server was set back from version %s to %s", kind.plural, since, version)
                    shelf.forget_all()
                for item in items:
                    there.add(item["metadata"]["uid"])
                    if shelf.put(item):
                        await self._tell(kind, item["metadata"])
        gone = [
            shelf.read(place)["metadata"]
            for place, entry in shelf.entries.items()
            if namespace in ("", place[0]) and entry.uid not in there and entry.version <= int(version)
        ]
        for meta in gone:
            shelf.remove(meta, version)
            await self._tell(kind, meta)
        return version

    async def _follow(self, kind: Kind, shelf: Shelf, namespace: str, since: str) -> None:
        """Follow one watch after the other until cancelled."""
        backoff, lost = FIRST_BACKOFF_SECONDS, False
        while True:
            try:
                if lost:
                    since, lost = await self._relist(kind, shelf, namespace, since), False
                async for event, item in self.watch(kind, namespace, _chosen(kind), since):
                    since, backoff = str(item["metadata"]["resourceVersion"]), FIRST_BACKOFF_SECONDS
                    if event != "BOOKMARK":
                        await self._take(kind, shelf, event, item)
            except ApiError as error:
                metrics.WATCH_ERRORS.labels(kind=kind.kind, code=str(error.status)).inc()
                # Else the stream broke, or the API server has too much to do: it goes on where it was, without a list.
                lost = error.status not in (0, 429, 500, 503)
                if error.status != 410:
                    log.warning("watch of %s: %s", kind.plural, error)
                    backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)
            await asyncio.sleep(backoff)

    async def _tell(self, kind: Kind, meta: Mapping[str, Any]) -> None:
        told = self._service_changed if kind is INFERENCE_SERVICE else self._changed
        if told is not None:
            await told(meta)

    @contextlib.asynccontextmanager
    async def _written(self, kind: Kind, place: Place) -> AsyncIterator[None]:
        """While an object is written: events of it wait until the answer is known."""
        shelf = self._shelves.get(kind.kind)
        if shelf is None:
            yield
            return
        shelf.writing[place] = shelf.writing.get(place, 0) + 1
        try:
            yield
        finally:
            shelf.writing[place] -= 1
            if not shelf.writing[place]:
                del shelf.writing[place]
                for event, item in shelf.held.pop(place, ()):
                    await self._take(kind, shelf, event, item)

    async def _take(self, kind: Kind, shelf: Shelf, event: str, item: Object) -> None:
        if shelf.holds(event, item):
            return
        if event == "DELETED":
            shelf.remove(item["metadata"], item["metadata"]["resourceVersion"])
        elif not shelf.put(item):
            return  # an answer to a write told it before, and whoever wrote it knows
        await self._tell(kind, item["metadata"])


def _chosen(kind: Kind) -> str:
    """The labels by which objects of a kind are ours: every service is, whatever it carries."""
    return "" if kind is INFERENCE_SERVICE else OURS
