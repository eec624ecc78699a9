"""The responses that clients may ask for again, in memory, and those that run in the background.

Invariants: the stored responses hold at most `max_bytes` of JSON, the least recently used go first; what runs is
never dropped. A response keeps the conversation before it alive, so it counts that too.
Knows nothing of how responses are made.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker_runtime.errors import NotFoundError, RequestError

Item = dict[str, Any]


@dataclass(slots=True)
class Stored:
    """A response, the items that it was asked with, and those of the conversation before them. `size` is in bytes."""

    response: dict[str, Any]
    items: Sequence[Item]
    history: Sequence[Item] = ()
    size: int = 0

    def conversation(self) -> list[Item]:
        """Everything said so far, the response's own output last."""
        return [*self.history, *self.items, *self.response["output"]]


@dataclass(slots=True)
class Job:
    """A response that is being made in the background. Setting `cancelled` ends it."""

    stored: Stored
    cancelled: asyncio.Event
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The store of one server. `max_bytes` 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.jobs: dict[str, Job] = {}
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, stored: Stored) -> None:
        """Keep a finished response, and drop the oldest where room is short; one larger than all is not kept."""
        name = stored.response["id"]
        self.discard(name)
        stored.size += len(json.dumps([stored.response, stored.items]))
        if stored.size > self.max_bytes:
            return
        self._kept[name] = stored
        self._size += stored.size
        while self._size > self.max_bytes:
            self.discard(next(iter(self._kept)))

    def discard(self, name: str) -> bool:
        """Forget a finished response; whether there was one."""
        found = self._kept.pop(name, None)
        self._size -= found.size if found else 0
        return found is not None

    def __contains__(self, name: str) -> bool:
        return name in self._kept or name in self.jobs

    def get(self, name: str) -> Stored:
        """A response, finished or not. Raises NotFoundError."""
        if name in self.jobs:
            return self.jobs[name].stored
        if name not in self._kept:
            raise NotFoundError(f"Response with id '{name}' not found.", param="response_id")
        self._kept.move_to_end(name)
        return self._kept[name]

    def require(self, param: str) -> None:
        """Raise RequestError, blaming `param`, where nothing is kept."""
        if not self.max_bytes:
            raise RequestError(
                f"{param} needs a server that keeps responses, that is one API process (--api-server-count 1) with "
                "--response-store-bytes above 0.",
                param=param,
            )

    def previous(self, name: str) -> Stored:
        """A finished response, to go on with. Raises RequestError."""
        self.require("previous_response_id")
        if name in self.jobs:
            raise RequestError(
                f"Previous response with id '{name}' is not finished.",
                param="previous_response_id",
                code="previous_response_not_finished",
            )
        if name not in self._kept:
            raise RequestError(
                f"Previous response with id '{name}' not found; it may have been dropped, or was not stored.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self.get(name)
