"""Ask a route of this server from within, as a client would, without a socket.

The routes that speak other dialects (responses, Anthropic's messages, batches) translate a request, ask the chat
route, and translate its answer back; prompts, sampling, tools, cancellation and errors are the chat route's alone.
Invariants: the inner request is read and checked as if it had come over HTTP; the client's disconnect is the inner
request's too, so it aborts the generation; no task and no queue stand between the inner stream and the outer one.
Knows nothing of what is asked or answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.http import Message, Receive, Request, Response, Send
from stoker_runtime.api.http.sse import HEADERS, EventStream
from stoker_runtime.errors import StokerError

Handler = Callable[[ServerState, Request], Awaitable[object]]
"""What answers a route."""
Names = Iterable[tuple[str, str]]
"""Pairs of an inner field and the field of the outer request that it came from."""

# What describes the outer body, and not the inner one.
BODY_HEADERS = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding")


class _Replay:
    """A receive channel that gives one body, and then what the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            return await self._receive()
        return {"type": "http.request", "body": body, "more_body": False}


def inner_request(outer: Request, path: str, payload: Any, receive: Receive | None = None) -> Request:
    """POST `payload` to `path` on behalf of `outer`, whose client (or else `receive`) decides when it is cancelled."""
    body = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    headers = [(name, value) for name, value in outer.headers.items() if name not in BODY_HEADERS]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    return Request(scope, _Replay(body, receive or outer.receive), outer.request_id)


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


async def ask(handler: Handler, state: ServerState, request: Request) -> dict[str, Any]:
    """The whole answer of `handler`. Raises what it raises."""
    answer = await handler(state, request)
    if not isinstance(answer, Response):
        raise TypeError("A stream came where a whole answer was asked for.")
    found: dict[str, Any] = json.loads(answer.body)
    return found


async def ask_stream(handler: Handler, state: ServerState, request: Request) -> EventStream:
    """The stream of `handler`, not begun yet; what is wrong with the request is raised here."""
    answer = await handler(state, request)
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


class TranslatedStream:
    """A response that is another route's stream in other words."""

    def __init__(self, inner: EventStream, request: Request, translator: Translator) -> None:
        self.status = 200
        self.headers = list(HEADERS)
        self._inner = inner
        self._request = request
        self._translation = Translation(translator)

    async def send(self, request: Request, send: Send) -> None:
        """Send the translated events. Raises StokerError when the inner request fails before its first token."""

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send({**message, "headers": self.headers})
                return
            more = message.get("more_body", False)
            body = await self._translation(message["body"])
            if body or not more:
                await send({"type": "http.response.body", "body": body.encode(), "more_body": more})

        await self._inner.send(self._request, forward)


def named_event(name: str, payload: Any, line: Callable[[Any], str]) -> str:
    """One event with its name, its payload written by `line`."""
    return f"event: {name}\ndata: {line(payload)}\n\n"
