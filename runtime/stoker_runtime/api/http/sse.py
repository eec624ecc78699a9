"""Server-sent events written straight to ASGI: no task, no model object and no copy per token.

Invariants: the response starts with the first news of the engine, so what fails before it is an ordinary error
response; after that an error is an event; `[DONE]` comes last in either case. A client that goes away aborts
the generation.
Knows nothing of what events hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from json.encoder import encode_basestring
from typing import Any, Protocol

from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.generate.generation import Answers, Delta, Work, gathered
from stoker_runtime.api.http.edge import error_body
from stoker_runtime.api.http.http import Header, Message, Receive, Request, Send
from stoker_runtime.errors import EngineError, StokerError, UnavailableError

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Characters that some clients take for line ends inside an event; JSON may write them as escapes.
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_text(text: str) -> str:
    """`text` as a JSON string that no line splitter cuts."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(_LINE_ENDS)


def json_line(payload: Any) -> str:
    """`payload` as JSON that no line splitter cuts."""
    body = _encode(payload)
    return body if body.isascii() else body.translate(_LINE_ENDS)


def event(payload: Any) -> bytes:
    """One event."""
    return f"data: {json_line(payload)}\n\n".encode()


class EventFormat(Protocol):
    """How one route writes deltas as events."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas, joined; may be empty."""
        ...

    def closing(self) -> bytes:
        """The events after the last delta, without `[DONE]`; may be empty."""
        ...


async def _abort_on_disconnect(receive: Receive, generation: Answers) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort("The client went away.")


@asynccontextmanager
async def abort_on_disconnect(receive: Receive, generation: Answers) -> AsyncIterator[None]:
    """Abort `generation` when the client goes away inside the block."""
    watch = asyncio.ensure_future(_abort_on_disconnect(receive, generation))
    try:
        yield
    finally:
        watch.cancel()


async def collect(receive: Receive, generation: Answers) -> list[Delta]:
    """All deltas of a generation. Raises EngineError, or what it was aborted with."""
    deltas: list[Delta] = []
    async with abort_on_disconnect(receive, generation):
        while fresh := await generation.next():
            deltas += fresh
    if generation.aborted is not None:
        raise generation.aborted
    return deltas


class EventStream:
    """The response of a streaming route. The work is submitted when the response is sent, and ends with it."""

    def __init__(
        self, state: ServerState, service: Service, work: Work, layout: Callable[[Answers], EventFormat]
    ) -> None:
        self.status = 200
        self.headers = list(HEADERS)
        self._state = state
        self._service = service
        self._work = work
        self._layout = layout

    async def send(self, request: Request, send: Send) -> None:
        """Send events until the generation ends. Raises StokerError when it fails before its first token."""
        with self._state.generate(self._service, self._work) as generation:
            async with abort_on_disconnect(request.receive, generation):
                first = await generation.next()
                if not first:
                    raise generation.aborted or UnavailableError("The request was aborted.")
                await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
                closing = await self._body(generation, first, send)
        await send(_part(closing + DONE, more=False))

    async def _body(self, generation: Answers, deltas: list[Delta], send: Send) -> bytes:
        """Send the events of all deltas; return what closes the stream."""
        try:
            layout, interval = self._layout(generation), self._work.interval
            while deltas:
                if body := layout.events(deltas):
                    await send(_part(body))
                deltas = await (generation.next() if interval == 1 else gathered(generation, interval))
            if generation.aborted is not None:
                raise generation.aborted
            return layout.closing()
        except StokerError as error:
            return event(error_body(error))
        except Exception:
            log.exception("A stream failed.")
            return event(error_body(EngineError("The server failed on this request.")))


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
