"""What the API asks of the engine's front: submit requests, read their tokens, abort, and know how it fares.

Invariants: torch-free. A stream carries the outputs of all requests submitted together, in the order the engine
made them; each request's last output has `finish` set, also when the engine dies (ERROR). Nothing here blocks.
Knows nothing of processes, sockets, text or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stoker_runtime.request import Adapter, EngineStats, Request, TokenOutput


class TokenStream(Protocol):
    """The outputs of requests that were submitted together."""

    async def next(self) -> Sequence[TokenOutput]:
        """Wait until there is news, then return all of it; at least one output.

        Must not be called after every request has finished.
        """
        ...


class EngineClient(Protocol):
    """A running engine as the API sees it."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of one sequence, prompt and output together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows: `0 … vocab_size - 1`."""
        ...

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that are served, by the names that clients call them."""
        ...

    async def load_adapter(self, name: str, path: str, *, parent: str = "", replace: bool = False) -> None:
        """Serve the PEFT folder `path` as `name`.

        Raises RequestError for a name that is taken or a folder that cannot be used, UnsupportedError where no adapters
        are served; nothing has changed then.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for `name`. Raises NotFoundError."""
        ...

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """Take no new requests, and give the device's memory back once nothing runs; with `abort` what runs ends first.

        Raises RequestError for another level than 1 and 2, or when it is woken up before, UnavailableError where the
        host has no room, NotFoundError where it was not started to sleep.
        """
        ...

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory of these parts again, or of all; requests are taken when all are there.

        Raises UnavailableError where the device has no room, ModelError for files that are not what they were: it
        sleeps on.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queue `requests` (all or none).

        Raises CapacityError when the queue is full, UnavailableError while starting or draining, EngineDeadError
        when there is no engine any more.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are unknown or finished are ignored. Their streams get ABORT."""
        ...

    def stats(self) -> EngineStats:
        """The newest heartbeat."""
        ...

    @property
    def open_requests(self) -> int:
        """Requests submitted here that have not had their last output."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine process is gone or its heartbeat is overdue."""
        ...
