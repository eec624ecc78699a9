"""The ASGI application: the table of routes, the error handlers and the edge around them.

Invariants: every route stands in ROUTES with the body it reads, from which the OpenAPI document is made.
Knows nothing of how a server is started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from stoker_runtime.api import chat, completions, service_routes
from stoker_runtime.api.edge import Edge, on_http_error, on_stoker_error, on_unexpected
from stoker_runtime.api.fields import Body
from stoker_runtime.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker_runtime.api.state import ServerState
from stoker_runtime.errors import StokerError
from stoker_runtime.version import VERSION

Handler = Callable[[ServerState, Request], Awaitable[Response]]


class Route(NamedTuple):
    """One route; `body` is what a POST reads."""

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None


ROUTES = (
    Route("POST", "/v1/completions", completions.create_completion, CompletionBody),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, ChatBody),
    Route("GET", "/v1/models", service_routes.list_models),
    Route("GET", "/v1/models/{name:path}", service_routes.get_model),
    Route("POST", "/tokenize", service_routes.tokenize, TokenizeBody),
    Route("POST", "/detokenize", service_routes.detokenize, DetokenizeBody),
    Route("GET", "/health", service_routes.health),
    Route("GET", "/ping", service_routes.health),
    Route("POST", "/ping", service_routes.health),
    Route("GET", "/ready", service_routes.ready),
    Route("GET", "/version", service_routes.version),
    Route("GET", "/load", service_routes.load),
    Route("GET", "/metrics", service_routes.metrics),
)


def create_app(state: ServerState) -> ASGIApp:
    """The application that serves `state`."""
    app = FastAPI(title="Stoker", version=VERSION, docs_url=None, redoc_url=None)
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _bind(route.handler, state),
            methods=[route.method],
            response_model=None,
            name=route.handler.__name__,
            description=route.handler.__doc__,
            openapi_extra=_request_schema(route.body) if route.body else None,
        )
    app.add_exception_handler(StokerError, on_stoker_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected)
    return Edge(app, state.config.api_keys, state.config.access_log)


def _bind(handler: Handler, state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    return endpoint


def _request_schema(body: type[Body]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body.model_json_schema()}},
        }
    }
