"""A response in the making: what was asked, and its events from the chunks of the chat route.

Invariants: a response that ends, however it ends, is stored with its last event, where it is stored at all.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_runtime.api.answering.prompts import encode
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.sse import named_event
from stoker_runtime.api.responses.body import ResponsesBody
from stoker_runtime.api.responses.events import Event, ResponseBuilder, response_usage
from stoker_runtime.api.responses.store import ResponseStore, Stored
from stoker_runtime.errors import StorageError

log = logging.getLogger(__name__)
NOTABLE = {"response.in_progress", "response.output_item.done"}
"""Events after which the response reads differently."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: its body, the chat request it stands for, and the response as it begins.

    `size` is about the bytes of the chat request.
    """

    body: ResponsesBody
    payload: dict[str, Any]
    names: list[tuple[str, str]]
    stored: Stored
    keep: bool
    size: int


def streaming(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request as a stream."""
    return {**payload, "stream": True, "stream_options": {"include_usage": True}}


async def finished(state: ServerState, builder: ResponseBuilder, reason: str, usage: Mapping[str, Any]) -> list[Event]:
    """The last events of a response that did not fail."""
    events = builder.close(reason)
    texts = [item["content"][0]["text"] for item in builder.response["output"] if item["type"] == "reasoning"]
    tokens = sum([len(await encode(state.loaded(), text, False)) for text in texts])
    return [*events, builder.finish(reason, response_usage(usage, tokens))]


def written(event: Event) -> str:
    """An event as it is sent."""
    return named_event(event["type"], event)


def numbered(event: Event) -> tuple[int, str]:
    """An event as it is stored."""
    return event["sequence_number"], written(event)


class ResponseEvents:
    """The events of one response from the chunks of the chat route. `cancelled` is set when its end is wanted.

    The events of one in the background are stored, by `advance` and at its end; those of others are not.
    """

    def __init__(
        self, state: ServerState, store: ResponseStore, asked: Asked, cancelled: asyncio.Event | None = None
    ) -> None:
        self._pending: list[Event] = []
        self._storing = asyncio.Lock()
        self._state = state
        self._store = store
        self._asked = asked
        self._cancelled = cancelled
        self._builder = ResponseBuilder(asked.stored.response)
        self._begun = False
        self._reason = "stop"
        self._usage: dict[str, Any] = {}

    async def advance(self) -> None:
        """Store what is new of a response in the background, and end it where that is wanted. Raises StorageError."""
        async with self._storing:
            response, fresh = self._asked.stored.response, self._pending
            # Its end is for `put` to write.
            changed = response["status"] == "in_progress" and any(event["type"] in NOTABLE for event in fresh)
            snapshot = {**response, "output": list(response["output"])} if changed else None
            self._pending = []
            try:
                ended = await asyncio.to_thread(
                    self._store.advance, self._asked.stored, snapshot, [numbered(event) for event in fresh]
                )
            except StorageError:
                self._pending = [*fresh, *self._pending]
                raise
        if ended and self._cancelled is not None:
            self._cancelled.set()

    def _begin(self) -> list[Event]:
        begun, self._begun = self._begun, True
        return [] if begun else self._builder.begin()

    def chunk(self, chunk: Mapping[str, Any]) -> str:
        """The events of one chunk."""
        events = self._begin()
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            logprobs = choice.get("logprobs") or {}
            events += self._builder.add(choice["delta"], logprobs.get("content") or ())
            self._reason = choice["finish_reason"] or self._reason
        return self._said(events)

    async def failed(self, error: Mapping[str, Any]) -> str:
        """response.failed, after what is open is closed."""
        events = self._begin()
        if self._cancelled is not None and self._cancelled.is_set():
            self._builder.cancel()
        else:
            events += self._builder.fail(error)
        text = self._said(events)
        try:
            return await self._kept(text)
        except StorageError as error:
            log.error("A response that failed cannot be stored: %s", error.message)
            return text

    async def finish(self) -> str:
        """response.completed or response.incomplete; response.failed where it could not be stored."""
        text = self._said(await finished(self._state, self._builder, self._reason, self._usage))
        try:
            return await self._kept(text)
        except StorageError as error:
            log.error("A response cannot be stored: %s", error.message)
            return self._said(self._builder.fail({"type": error.type, "code": error.code, "message": error.message}))

    def _said(self, events: list[Event]) -> str:
        if self._cancelled is not None:
            self._pending += events
        return "".join([written(event) for event in events])

    async def _kept(self, text: str) -> str:
        """`text`, once the response is stored. Raises StorageError."""
        if self._asked.keep:
            # Not before what `advance` took away is there.
            async with self._storing:
                last, self._pending = [numbered(event) for event in self._pending], []
                await asyncio.to_thread(self._store.put, self._asked.stored, last)
        return text
