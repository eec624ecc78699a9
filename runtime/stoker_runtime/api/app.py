"""The ASGI application: the table of routes, and the one place where a request becomes an answer or an error.

Invariants: every route stands in ROUTES with the body it reads, from which the OpenAPI document is made; whatever a
handler raises becomes an error object here; each request is logged once, without its content.
Knows nothing of how a server is started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.batch import routes as batch
from stoker_runtime.api.batch.execute import ENDPOINTS, LineExecutor
from stoker_runtime.api.batch.records import BatchBody
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.api.http import pages
from stoker_runtime.api.http.cors import CrossOrigin
from stoker_runtime.api.http.edge import REQUEST_ID_HEADER, error_body, error_response, request_id_of
from stoker_runtime.api.http.fields import Body
from stoker_runtime.api.http.http import ClientGone, Header, Receive, Request, Response, Scope, Send, json_response
from stoker_runtime.api.http.keys import KeyRing
from stoker_runtime.api.http.openapi import Described, Query, openapi_document
from stoker_runtime.api.http.paging import page_query
from stoker_runtime.api.messages import routes as messages
from stoker_runtime.api.messages.body import CountTokensBody, MessagesBody
from stoker_runtime.api.openai import chat, completions, lora, service_routes
from stoker_runtime.api.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker_runtime.api.pooling import embeddings, scoring
from stoker_runtime.api.pooling.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from stoker_runtime.api.responses import routes as responses
from stoker_runtime.api.responses.body import ResponsesBody
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

    `error_body` is the shape of its errors. `query`: the fields of its query, with their schemas.

    A `*` in a path stands for the request's name: one segment, or at the end of a path whatever follows.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    open: bool = False
    error_body: Callable[[StokerError], dict[str, Any]] = error_body
    query: Query = MappingProxyType({})

    @property
    def described(self) -> Described:
        """What the OpenAPI document is made of."""
        return self.method, self.path, self.handler, self.body, self.query


async def openapi(state: ServerState, _: Request) -> Response:
    """GET /openapi.json: what this server understands."""
    return json_response(openapi_document(route.described for route in ROUTES))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/completions", completions.create_completion, CompletionBody),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, ChatBody),
    Route("POST", "/v1/responses", responses.create_response, ResponsesBody),
    Route("POST", "/v1/responses/input_tokens", responses.count_input_tokens, ResponsesBody),
    Route("GET", "/v1/responses/*", responses.get_response, query=responses.STREAM_QUERY),
    Route("DELETE", "/v1/responses/*", responses.delete_response),
    Route("POST", "/v1/responses/*/cancel", responses.cancel_response),
    Route("GET", "/v1/responses/*/input_items", responses.list_input_items, query=page_query()),
    Route("POST", "/v1/messages", messages.create_message, MessagesBody, error_body=messages.error_body),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, CountTokensBody, error_body=messages.error_body),
    Route("POST", "/v1/files", batch.upload_file, batch.FileBody),
    Route("GET", "/v1/files", batch.list_files, query=batch.FILES_QUERY),
    Route("GET", "/v1/files/*", batch.get_file),
    Route("DELETE", "/v1/files/*", batch.delete_file),
    Route("GET", "/v1/files/*/content", batch.get_file_content),
    Route("POST", "/v1/batches", batch.create_batch, BatchBody),
    Route("GET", "/v1/batches", batch.list_batches, query=page_query()),
    Route("GET", "/v1/batches/*", batch.get_batch),
    Route("POST", "/v1/batches/*/cancel", batch.cancel_batch),
    Route("POST", "/v1/embeddings", embeddings.create_embedding, EmbeddingBody),
    Route("POST", "/pooling", embeddings.create_pooling, PoolingBody),
    *(Route("POST", path, scoring.create_score, ScoreBody) for path in ("/score", "/v1/score")),
    *(Route("POST", path, scoring.create_rerank, RerankBody) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Route("GET", "/v1/models", service_routes.list_models),
    Route("GET", "/v1/models/*", service_routes.get_model),
    Route("POST", "/tokenize", service_routes.tokenize, TokenizeBody),
    Route("GET", "/tokenizer_info", service_routes.tokenizer_info),
    Route("POST", "/detokenize", service_routes.detokenize, DetokenizeBody),
    Route("POST", "/v1/load_lora_adapter", lora.load_adapter),
    Route("POST", "/v1/unload_lora_adapter", lora.unload_adapter),
    Route("GET", "/openapi.json", openapi),
    Route("GET", "/docs", pages.docs_page, open=True),
    Route("GET", "/", pages.chat_page, open=True),
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


def _batch_runner(state: ServerState) -> BatchRunner:
    """What runs batches on this server's own routes. Raises ConfigError when the folder cannot be used."""
    handlers = {route.path: route.handler for route in ROUTES if route.method == "POST" and route.path in ENDPOINTS}

    def busy() -> bool:
        return state.service is not None and state.service.engine.stats().waiting > 0

    executor = LineExecutor(state, handlers)
    return BatchRunner(Path(state.config.batch_dir), executor, busy, state.config.batch_concurrency)


class Application:
    """The routes of one server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._keys = KeyRing(state.config.api_keys, state.config.api_key_file)
        self._cross_origin = CrossOrigin(state.config)
        self._access_log = state.config.access_log
        if state.config.batch_dir:
            state.batches = _batch_runner(state)
        self._exact: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._exact.setdefault(route.path, {})[route.method] = route
        named = [(path.partition("*"), methods) for path, methods in self._exact.items() if "*" in path]
        # A name may hold slashes, so what ends in more comes first.
        self._named = sorted(named, key=lambda entry: -len(entry[0][2]))

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
        shape = next((route.error_body for route in methods.values()), error_body)
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
            response = error_response(error, shape)
            if isinstance(error, MethodError):
                response.headers.append((b"allow", ", ".join(sorted(methods)).encode()))
        except Exception:
            log.exception("A request failed.", extra={"request_id": request.request_id})
            response = error_response(EngineError("The server failed on this request."), shape)
        return await self._send(response, request, send)

    async def _send(self, answer: Answer, request: Request, send: Send) -> int:
        # Anthropic's clients read the id without the x.
        answer.headers += [(name, request.request_id.encode()) for name in (REQUEST_ID_HEADER, b"request-id")]
        answer.headers += self._cross_origin.headers(request)
        await answer.send(request, send)
        return answer.status

    def _find(self, request: Request) -> dict[str, Route]:
        """The routes of this path by method."""
        found = self._exact.get(request.path)
        if found is not None:
            return found
        for (before, _, after), methods in self._named:
            if request.path.startswith(before) and request.path.endswith(after):
                request.name = request.path[len(before) : len(request.path) - len(after)]
                if request.name and not (after and "/" in request.name):
                    return methods
        return {}

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
