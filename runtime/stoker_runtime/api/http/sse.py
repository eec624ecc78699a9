"""Server-sent events: how they are written, and how a client that goes away is noticed.

Invariants: an event is never cut by a client that splits lines in its own way; writing one makes no model object.
Knows nothing of what events hold.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive

DONE = b"data: [DONE]\n\n"
HEADERS = [
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


def named_event(name: str, payload: Any) -> str:
    """One event with its name."""
    return f"event: {name}\ndata: {json_line(payload)}\n\n"


def part(body: bytes, more: bool = True) -> Message:
    """A piece of an answer."""
    return {"type": "http.response.body", "body": body, "more_body": more}


class Events(Response):
    """An answer that is a stream of events; `__call__` is for those who make one."""

    def __init__(self) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)

    @property
    def start(self) -> Message:
        """What goes out first."""
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


class Abortable(Protocol):
    """What a client's disconnect ends."""

    def abort(self, reason: str = ...) -> None:
        """End it."""
        ...


async def disconnected(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _abort_on_disconnect(receive: Receive, running: Abortable) -> None:
    await disconnected(receive)
    running.abort("The client went away.")


@asynccontextmanager
async def abort_on_disconnect(receive: Receive, running: Abortable) -> AsyncIterator[None]:
    """Abort `running` when the client goes away inside the block."""
    watch = asyncio.ensure_future(_abort_on_disconnect(receive, running))
    try:
        yield
    finally:
        watch.cancel()
