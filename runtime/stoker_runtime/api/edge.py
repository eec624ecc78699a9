"""The edge of the server, around every route: request ids, API keys, body limits, the access log, error bodies.

Invariants: pure ASGI, one wrapper for all of it; an API key is compared in constant time against every key and
never reaches a log; an error leaves as OpenAI's error object whatever raised it, and an unexpected one says
nothing of its cause to the client.
Knows nothing of models or engines.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_runtime.errors import (
    AuthenticationError,
    CapacityError,
    EngineError,
    NotFoundError,
    RequestError,
    StokerError,
    TooLargeError,
)

access = logging.getLogger("stoker.access")
log = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics", "/load"})
QUIET_PATHS = OPEN_PATHS
REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID = 128


def error_body(error: StokerError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: StokerError) -> Response:
    """The response to an error, with Retry-After where waiting helps."""
    headers: dict[str, str] = {}
    if isinstance(error, CapacityError):
        headers = {"retry-after": f"{max(1, round(error.retry_after))}"}
    elif isinstance(error, AuthenticationError):
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(error_body(error), error.status, headers)


async def on_stoker_error(_: Request, error: Exception) -> Response:
    """Exception handler for our own errors."""
    assert isinstance(error, StokerError)
    if error.status >= 500 and not isinstance(error, CapacityError):
        log.error("%s: %s", type(error).__name__, error.message)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for what routing raises."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFoundError(f"There is no route {where}."))
    if error.status_code == 405:
        refused = RequestError(f"{where}: this method is not allowed here.")
        return JSONResponse(error_body(refused), 405, dict(error.headers or {}))
    return JSONResponse(error_body(RequestError(str(error.detail))), error.status_code, dict(error.headers or {}))


async def on_unexpected(_: Request, error: Exception) -> Response:
    """Exception handler for bugs: the log has the cause, the client does not."""
    log.error("A request failed.", exc_info=error)
    return error_response(EngineError("The server failed on this request."))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises TooLargeError as soon as it passes `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLargeError(f"The body has {declared} bytes; at most {limit} are allowed.")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLargeError(f"The body has more than {limit} bytes, which is the most allowed.")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class KeyCheck:
    """Whether a request carries one of the server's API keys; without keys everything passes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __call__(self, authorization: bytes) -> bool:
        """Compare with every key, so that the time taken says nothing about which one was near."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found and scheme.lower() == b"bearer"


class Edge:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], access_log: bool = True) -> None:
        self._app = app
        self._allowed = KeyCheck(keys)
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(REQUEST_ID_HEADER, b""))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (REQUEST_ID_HEADER, request_id.encode())]}
            await send(message)

        path = scope["path"]
        if path in OPEN_PATHS or scope["method"] == "OPTIONS" or self._allowed(headers.get(b"authorization", b"")):
            await self._app(scope, receive, send_with_id)
        else:
            refused = AuthenticationError("The API key is missing or wrong.", code="invalid_api_key")
            await error_response(refused)(scope, receive, send_with_id)
        if self._access_log and path not in QUIET_PATHS:
            elapsed = (time.monotonic() - started) * 1000
            access.info("%s %s %d %.1f ms", scope["method"], path, status, elapsed, extra={"request_id": request_id})


def _request_id(given: bytes) -> str:
    """The client's own id where it is a plain one, else a new one."""
    if 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in given):
        return given.decode("ascii")
    return os.urandom(16).hex()
