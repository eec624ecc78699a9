"""The thin layer between ASGI and the routes: a request, a response, and their bytes.

Invariants: nothing here runs per token; a response goes out in two ASGI messages. A framework's stack between the
server and the stream would cost more per token than everything else the API does.
Knows nothing of routes, models or errors beyond a body that is too large.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from stoker_runtime.errors import TooLargeError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]


class ClientGone(Exception):
    """The client went away before its request was read; nobody reads an answer."""


class Request:
    """One HTTP request. `request_id` is the client's own or a new one; `name` is the part of a path that `*` takes."""

    __slots__ = ("_query", "headers", "method", "name", "path", "receive", "request_id")

    def __init__(self, scope: Scope, receive: Receive, request_id: str = "") -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.request_id = request_id
        self.name = ""
        self._query: bytes = scope.get("query_string", b"")

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query; of a field that is repeated, the last."""
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises TooLargeError as soon as it passes `limit` bytes, or ClientGone."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise TooLargeError(f"The body has {int(declared)} bytes; at most {limit} are allowed.")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLargeError(f"The body has more than {limit} bytes, which is the most allowed.")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


class Response:
    """A whole answer."""

    def __init__(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        self.status = status
        self.body = body
        self.headers: list[Header] = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]

    async def send(self, request: Request, send: Send) -> None:
        """Write it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def json_response(content: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, b"application/json", status)
