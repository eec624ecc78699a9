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
from stoker_runtime.api.http.errors import error_answer
from stoker_runtime.errors import ForbiddenError

DIRECT = "stoker.send"
"""Where a scope holds the server's own `send`."""
REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID = 128
CLIENT_GONE = 499

_NO_CERTIFICATE = error_answer(ForbiddenError("This server wants a client certificate.", code="certificate_required"))

access = logging.getLogger("stoker.access")
log = logging.getLogger(__name__)


class Edge:
    """`app`, with what every answer carries."""

    def __init__(
        self, app: ASGIApp, quiet: Collection[str], access_log: bool, uncertified: Collection[str] | None = None
    ) -> None:
        """`quiet` are the paths that leave no line in the access log.

        `uncertified` are those that alone may be asked by who showed no client certificate; None: everything may.
        """
        self._app = app
        self._quiet = frozenset(quiet)
        self._access_log = access_log
        self._uncertified = frozenset(uncertified) if uncertified is not None else None

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
            await (self._app if self._may(scope) else _NO_CERTIFICATE)(inner, receive, labelled)
        except Exception:
            # Whoever asked has been answered.
            log.exception("A request failed.", extra={"request_id": name})
        if self._access_log and scope["path"] not in self._quiet:
            elapsed = (time.monotonic() - started) * 1000
            access.info("%s %s %d %.1f ms", method, scope["path"], status, elapsed, extra={"request_id": name})

    def _may(self, scope: Scope) -> bool:
        """Whether it needs no client certificate, or has one that the handshake verified."""
        if self._uncertified is None or scope["path"] in self._uncertified:
            return True
        return bool((scope.get("extensions") or {}).get("tls", {}).get("client_cert_chain"))


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
