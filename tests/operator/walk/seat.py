"""An operator's connection as the walks give it: it reads from a mirror that all walks share, can die between two
writes, and counts what was written, and what of that changed nothing.

Invariants: what it answers is what the API server answered.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.observe.mirror import Mirror


class Died(BaseException):
    """The operator's process ended between two writes: nothing of the operator's catches this."""


class Seat(Mirror):
    """One service's operator. `service` is the service as it was last read or written, `writes` are all writes so far;
    `idle` are those that left their object as it was, or deleted what was being deleted, `refused` is the one before
    which it died.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._share(mirror)
        self._namespaces, self._listing = mirror._namespaces, mirror._listing
        self._changed, self._service_changed = mirror._changed, mirror._service_changed
        self._shelves = mirror._shelves
        self.service: Object = {}
        self.writes: list[str] = []
        self.idle: list[str] = []
        self.refused = ""
        self._left: int | None = None

    def dies_before(self, write: int | None) -> None:
        """It ends before its write number `write` from now on; None = it lives."""
        self._left = write

    async def _request(self, method: str, kind: Kind, path: str, *more: Any, **named: Any) -> Object:
        if method == "GET":
            answer = await super()._request(method, kind, path, *more, **named)
        else:
            answer = await self._write(method, kind, path, *more, **named)
        if kind is kinds.INFERENCE_SERVICE and "metadata" in answer:
            self.service = answer
        return answer

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        found = await super().get(kind, namespace, name)
        if kind is kinds.INFERENCE_SERVICE and found is not None:
            self.service = found
        return found

    async def _write(self, method: str, kind: Kind, path: str, *more: Any, **named: Any) -> Object:
        if self._left is not None:
            if not self._left:
                self.refused = f"{method} {path}"
                raise Died
            self._left -= 1
        if kind is kinds.EVENT:
            return {}  # nobody reads them here, and they are a quarter of all writes
        version, going = self._before(kind, path)
        answer = await super()._request(method, kind, path, *more, **named)
        said = f"{method} {path}"
        self.writes.append(said)
        same = method == "PATCH" and version == int(answer["metadata"]["resourceVersion"])
        if same or (method == "DELETE" and going):
            self.idle.append(said)
        return answer

    def _before(self, kind: Kind, path: str) -> tuple[int, bool]:
        """(the version at which the object is known, whether it is known to be going)."""
        namespace, name = path.split("/namespaces/")[1].split("/")[0], path.removesuffix("/status").rsplit("/", 1)[1]
        if kind is kinds.INFERENCE_SERVICE:
            return int(self.service["metadata"]["resourceVersion"]), False
        shelf = self._shelves.get(kind.kind)
        entry = shelf.entries.get((namespace, name)) if shelf is not None else None
        if shelf is None or entry is None:
            return -1, False
        return entry.version, "deletionTimestamp" in shelf.read((namespace, name))["metadata"]


class Unwatched(Cluster):
    """The connection of an operator that reads everything from the API server. `writes` are not made."""

    def __init__(self, cluster: Cluster) -> None:
        self._share(cluster)
        self.writes: list[str] = []

    async def _request(self, method: str, kind: Kind, path: str, *more: Any, **named: Any) -> Object:
        if method == "GET":
            return await super()._request(method, kind, path, *more, **named)
        self.writes.append(f"{method} {path}")
        raise ApiError(404, "NotFound", "nothing is to be written at rest")
