"""Ask a route of this server from within, as a client would, without a socket.

The routes that speak other dialects (responses, Anthropic's messages, batches) translate a request, ask the chat
route, and translate its answer back; prompts, sampling, tools, cancellation and errors are the chat route's alone.
Invariants: the inner body is read and checked as if it had come over HTTP; the client's disconnect is the inner
request's too, so it aborts the generation; no task and no queue stand between the inner stream and the outer one.
Knows nothing of what is asked or answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stoker_runtime.api.answering.streams import EventStream
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.edge import direct
from stoker_runtime.api.http.sse import Events, part
from stoker_runtime.errors import StokerError

Names = Iterable[tuple[str, str]]
"""Pairs of an inner field and the field of the outer request that it came from."""


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Let errors of the inner request speak of the outer request's fields; the first name that fits counts."""
    try:
        yield
    except StokerError as error:
        found = error.param or ""
        for inner, outer in names:
            rest = found.removeprefix(inner)
            if found.startswith(inner) and (not rest or rest[0] in ".["):
                error.param = outer + rest
                error.message = error.message.replace(found, error.param)
                break
        raise


def whole(answer: Response) -> dict[str, Any]:
    """What a route answered that was not asked for a stream."""
    if not isinstance(answer, JsonAnswer):
        raise TypeError("A whole answer was asked for, and something else came.")
    found: dict[str, Any] = answer.content
    return found


def streamed(answer: Response) -> EventStream:
    """The stream of a route that was asked for one, not begun yet."""
    if not isinstance(answer, EventStream):
        raise TypeError("A whole answer came where a stream was asked for.")
    return answer


class Translator(Protocol):
    """Makes the outer stream's events from the chunks of the inner one. What it returns is sent as it stands."""

    def chunk(self, chunk: Mapping[str, Any]) -> str:
        """The events of one chunk."""
        ...

    async def failed(self, error: Mapping[str, Any]) -> str:
        """The events of an error in mid-stream, which is the end."""
        ...

    async def finish(self) -> str:
        """The events at the end of a stream that did not fail."""
        ...


def read_events(body: bytes) -> Iterator[dict[str, Any] | None]:
    """The chunks of one piece of an event stream, which holds whole events; None for `[DONE]`."""
    for block in body.decode().split("\n\n"):
        if block:
            data = block.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


class Translation:
    """The part between two streams: takes the inner one's pieces, gives the outer one's text."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._failed = False

    async def __call__(self, body: bytes) -> str:
        """The outer events of one inner piece."""
        events: list[str] = []
        for chunk in read_events(body):
            if chunk is None:
                events.append("" if self._failed else await self._translator.finish())
            elif "error" in chunk:
                self._failed = True
                events.append(await self._translator.failed(chunk["error"]))
            else:
                events.append(self._translator.chunk(chunk))
        return "".join(events)


class TranslatedStream(Events):
    """An answer that is another route's stream in other words."""

    def __init__(self, inner: EventStream, translator: Translator) -> None:
        super().__init__()
        self._inner = inner
        self._translation = Translation(translator)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the translated events. Raises StokerError when the inner request fails before its first token."""
        straight = direct(scope, send)

        async def begin(_: Message) -> None:
            await send(self.start)

        async def forward(message: Message) -> None:
            body = await self._translation(message["body"])
            if body or not message["more_body"]:
                await straight(part(body.encode(), message["more_body"]))

        await self._inner.run(receive, begin, forward)
