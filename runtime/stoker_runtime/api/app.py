"""The ASGI application: the table of routes, and the one place where a request becomes an answer or an error.

Invariants: every route stands in ROUTES with the body it reads, from which the OpenAPI document is made; whatever a
handler raises becomes an error object here; each request is logged once, without its content.
Knows nothing of how a server is started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from stoker_runtime.api import chat, completions, service_routes
from stoker_runtime.api.cors import CrossOrigin
from stoker_runtime.api.edge import REQUEST_ID_HEADER, error_response, request_id_of
from stoker_runtime.api.fields import Body
from stoker_runtime.api.http import ClientGone, Header, Receive, Request, Response, Scope, Send, json_response
from stoker_runtime.api.keys import KeyRing
from stoker_runtime.api.openapi import openapi_document
from stoker_runtime.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker_runtime.api.state import ServerState
from stoker_runtime.errors import (
    AuthenticationError,
    CapacityError,
    EngineError,
    NotFoundError,
    RequestError,
    StokerError,
)

access = logging.getLogger("stoker.access")
log = logging.getLogger(__name__)
CLIENT_GONE = 499


class Answer(Protocol):
    """What a handler returns: whole, or a stream."""

    status: int
    headers: list[Header]

    async def send(self, request: Request, send: Send) -> None:
        """Write it. Raises StokerError only before anything was written."""
        ...


Handler = Callable[[ServerState, Request], Awaitable[Answer]]


class Route(NamedTuple):
    """One route. `body` is what a POST reads; `open`: no API key is asked for and no access logged.

    A path that ends in `/*` takes whatever follows as the request's name.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    open: bool = False


async def openapi(state: ServerState, _: Request) -> Response:
    """GET /openapi.json: what this server understands."""
    return json_response(openapi_document((route.method, route.path, route.handler, route.body) for route in ROUTES))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/completions", completions.create_completion, CompletionBody),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, ChatBody),
    Route("GET", "/v1/models", service_routes.list_models),
    Route("GET", "/v1/models/*", service_routes.get_model),
    Route("POST", "/tokenize", service_routes.tokenize, TokenizeBody),
    Route("POST", "/detokenize", service_routes.detokenize, DetokenizeBody),
    Route("GET", "/openapi.json", openapi),
    Route("GET", "/health", service_routes.health, open=True),
    Route("GET", "/ping", service_routes.health, open=True),
    Route("POST", "/ping", service_routes.health, open=True),
    Route("GET", "/ready", service_routes.ready, open=True),
    Route("GET", "/version", service_routes.version, open=True),
    Route("GET", "/load", service_routes.load, open=True),
    Route("GET", "/metrics", service_routes.metrics, open=True),
)


class MethodError(RequestError):
    """A route that exists, but not for this method."""

    status = 405


class Application:
    """The routes of one server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._keys = KeyRing(state.config.api_keys, state.config.api_key_file)
        self._cross_origin = CrossOrigin(state.config)
        self._access_log = state.config.access_log
        self._exact: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._exact.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        started = time.monotonic()
        request = Request(scope, receive)
        request.request_id = request_id_of(request.headers.get(REQUEST_ID_HEADER, b""))
        methods = self._find(request)
        status = await self._serve(request, methods, send)
        if self._access_log and not any(route.open for route in methods.values()):
            elapsed = (time.monotonic() - started) * 1000
            extra = {"request_id": request.request_id}
            access.info("%s %s %d %.1f ms", request.method, request.path, status, elapsed, extra=extra)

    async def _serve(self, request: Request, methods: dict[str, Route], send: Send) -> int:
        """Answer `request`; the status that was sent."""
        try:
            preflight = self._cross_origin.preflight(request)
            if preflight is not None:
                return await self._send(preflight, request, send)
            route = self._route(request, methods)
            return await self._send(await route.handler(self._state, request), request, send)
        except ClientGone:
            return CLIENT_GONE
        except StokerError as error:
            if error.status >= 500 and not isinstance(error, CapacityError):
                log.error("%s: %s", type(error).__name__, error.message, extra={"request_id": request.request_id})
            response = error_response(error)
            if isinstance(error, MethodError):
                response.headers.append((b"allow", ", ".join(sorted(methods)).encode()))
        except Exception:
            log.exception("A request failed.", extra={"request_id": request.request_id})
            response = error_response(EngineError("The server failed on this request."))
        return await self._send(response, request, send)

    async def _send(self, answer: Answer, request: Request, send: Send) -> int:
        answer.headers.append((REQUEST_ID_HEADER, request.request_id.encode()))
        answer.headers += self._cross_origin.headers(request)
        await answer.send(request, send)
        return answer.status

    def _find(self, request: Request) -> dict[str, Route]:
        """The routes of this path by method."""
        found = self._exact.get(request.path)
        if found is not None:
            return found
        parent, slash, _ = request.path.partition("/models/")
        found = self._exact.get(f"{parent}{slash}*", {}) if slash else {}
        if found:
            request.name = request.path.removeprefix(f"{parent}{slash}")
        return found

    def _route(self, request: Request, methods: dict[str, Route]) -> Route:
        # A HEAD is a GET whose body the server drops.
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if not (route is not None and route.open) and not self._keys.allows(request.headers):
            raise AuthenticationError("The API key is missing or wrong.", code="invalid_api_key")
        where = f"{request.method} {request.path}"
        if not methods:
            raise NotFoundError(f"There is no route {where}.")
        if route is None:
            raise MethodError(f"{where}: this method is not allowed here.")
        return route
