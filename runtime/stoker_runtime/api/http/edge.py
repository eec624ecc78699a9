"""The outermost layer of the application: ids, the access log, and the end of what nobody else caught.

Invariants: each request has an id, which its answer carries; each is logged once, without its content. What streams
go straight to the server, so this layer and those below it are passed once an answer, not once a token.
Knows nothing of routes beyond which of them are not logged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_runtime.api.http.caller import ANSWER_HEADERS, REQUEST_ID

DIRECT = "stoker.send"
"""Where a scope holds the server's own `send`."""
REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID = 128
CLIENT_GONE = 499

access = logging.getLogger("stoker.access")
log = logging.getLogger(__name__)


class Edge:
    """`app`, with what every answer carries."""

    def __init__(self, app: ASGIApp, quiet: Collection[str], access_log: bool) -> None:
        """`quiet` are the paths that leave no line in the access log."""
        self._app = app
        self._quiet = frozenset(quiet)
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        started = time.monotonic()
        name = _request_id(scope)
        # A HEAD is a GET whose body the server drops.
        method = scope["method"]
        extra: dict[str, str] = {}
        seen = {"method": "GET" if method == "HEAD" else method, REQUEST_ID: name, ANSWER_HEADERS: extra, DIRECT: send}
        inner = {**scope, **seen}
        status = CLIENT_GONE

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                # Anthropic's clients read the id without the x.
                ids = [(header, name.encode()) for header in (REQUEST_ID_HEADER, b"request-id")]
                told = [(header.encode(), value.encode()) for header, value in extra.items()]
                message = {**message, "headers": [*message["headers"], *ids, *told]}
            await send(message)

        try:
            await self._app(inner, receive, labelled)
        except Exception:
            # Whoever asked has been answered.
            log.exception("A request failed.", extra={"request_id": name})
        if self._access_log and scope["path"] not in self._quiet:
            elapsed = (time.monotonic() - started) * 1000
            access.info("%s %s %d %.1f ms", method, scope["path"], status, elapsed, extra={"request_id": name})


def direct(scope: Scope, send: Send) -> Send:
    """What sends the parts of a stream whose beginning went through `send`: no layer has to see them."""
    found: Send = scope.get(DIRECT, send)
    return found


def _request_id(scope: Scope) -> str:
    """The client's own id where it is a plain one, else a new one."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    if 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in given):
        return bytes(given).decode("ascii")
    return os.urandom(16).hex()
