"""The API server's part in `stoker up`: objects in memory, behind the interface the operator already speaks.

Invariants: `apply` keeps what it was not given (status, foreign annotations, replicas), as server-side apply does;
`generation` moves only with the spec; a pod that is deleted stays, marked, until its processes are gone.
Knows nothing of what the objects mean; validation is `spec.parse`'s.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import FIELD_MANAGER


def timestamp() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class LocalCluster(Cluster):
    """An in-memory stand-in for one API server. Use it from one event loop."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._changed = asyncio.Event()
        self.events: asyncio.Queue[Object] = asyncio.Queue()

    async def close(self) -> None:
        """There is no connection to end."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """A copy of the object, or None."""
        found = self._objects.get((kind.kind, namespace, name))
        return copy.deepcopy(found) if found else None

    async def served(self, wanted: Sequence[Kind]) -> frozenset[str]:
        """None of the kinds that a cluster may lack."""
        return frozenset()

    async def list_all(self, kind: Kind, namespace: str, selector: str = "") -> list[Object]:
        """Copies of the objects that carry the labels of `selector` ("a=b,c=d")."""
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        found = [item for item in self.of(kind) if not namespace or item["metadata"]["namespace"] == namespace]
        return [copy.deepcopy(item) for item in found if wanted.items() <= item["metadata"].get("labels", {}).items()]

    async def recent(self, kind: Kind) -> list[Object]:
        """What is there."""
        return await self.list_all(kind, "")

    async def apply(
        self, kind: Kind, manifest: Mapping[str, Any], subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """Create or update, or replace the status alone."""
        meta = manifest["metadata"]
        key = (kind.kind, meta["namespace"], meta["name"])
        live = self._objects.get(key)
        if subresource == "status":
            if live is None:
                raise ApiError(404, "NotFound", f"{kind.kind} {meta['name']} does not exist")
            live["status"] = copy.deepcopy(manifest["status"])
            return live
        return self.add(manifest) if live is None else self._update(live, manifest)

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Create; events are queued for whoever shows them."""
        if kind == kinds.EVENT:
            self.events.put_nowait(copy.deepcopy(dict(manifest)))
            return dict(manifest)
        meta = manifest["metadata"]
        if (kind.kind, meta["namespace"], meta["name"]) in self._objects:
            raise ApiError(409, "AlreadyExists", f"{kind.kind} {meta['name']} exists")
        return self.add(manifest)

    async def replace(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Leases are what the operator replaces, and one process needs none."""
        raise ApiError(405, "MethodNotAllowed", f"{kind.kind} cannot be replaced on one machine")

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, foreground: bool = False) -> None:
        """Delete this very object and what it owns: pods are there until their processes are gone, in any case."""
        live = self._objects.get((kind.kind, namespace, name))
        if live is not None and live["metadata"]["uid"] == uid:
            self.remove(live)

    # What the controllers and the pods of this process use: the live objects, to be changed in place.

    def of(self, kind: Kind) -> list[Object]:
        """The live objects of a kind."""
        return [item for key, item in self._objects.items() if key[0] == kind.kind]

    def owned_by(self, kind: Kind, owner: Object) -> Iterator[Object]:
        """The live objects of a kind that `owner` owns."""
        return (item for item in self.of(kind) if owner["metadata"]["uid"] in _owners(item))

    def add(self, manifest: Mapping[str, Any]) -> Object:
        """Store a new object."""
        item: Object = copy.deepcopy(dict(manifest))
        meta = item["metadata"]
        meta |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": timestamp()}
        self._objects[item["kind"], meta["namespace"], meta["name"]] = item
        self.touch()
        return item

    def remove(self, item: Object) -> None:
        """Delete an object and what it owns; pods are only marked, `forget` follows when their processes are gone."""
        if item["kind"] == "Pod":
            item["metadata"].setdefault("deletionTimestamp", timestamp())
        else:
            self.forget(item)
        owned = [other for other in self._objects.values() if item["metadata"]["uid"] in _owners(other)]
        for other in owned:
            self.remove(other)
        self.touch()

    def forget(self, item: Object) -> None:
        """Take an object out of the store."""
        meta = item["metadata"]
        self._objects.pop((item["kind"], meta["namespace"], meta["name"]), None)
        self.touch()

    def touch(self) -> None:
        """Say that something changed."""
        self._changed.set()

    async def changed(self, timeout: float) -> None:
        """Wait for a change, at most `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _update(self, live: Object, manifest: Mapping[str, Any]) -> Object:
        fresh: Object = copy.deepcopy(dict(manifest))
        meta = live["metadata"]
        for part in ("labels", "annotations"):
            if part in fresh["metadata"]:
                meta[part] = meta.get(part, {}) | fresh["metadata"][part]
        if "ownerReferences" in fresh["metadata"]:
            meta["ownerReferences"] = fresh["metadata"]["ownerReferences"]
        spec = live.get("spec", {}) | fresh.get("spec", {})
        if spec != live.get("spec", {}):
            live["spec"] = spec
            meta["generation"] += 1
        self.touch()
        return live


def _owners(item: Object) -> set[str]:
    return {reference["uid"] for reference in item["metadata"].get("ownerReferences") or ()}
