"""The application: the routers of all dialects, and the one place where what they raise becomes an answer.

Invariants: whoever asks anything but probes and pages must carry a key, also for a route that does not exist; whatever
a handler raises becomes an error in the dialect of its route.
Knows nothing of how a server is started.
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from stoker_runtime.api.answering import probes
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.batch import routes as batch
from stoker_runtime.api.batch.execute import LineExecutor
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.api.http import pages
from stoker_runtime.api.http.caller import check_key, request_id
from stoker_runtime.api.http.edge import CLIENT_GONE, Edge
from stoker_runtime.api.http.errors import MethodError, Shape, error_answer, error_body
from stoker_runtime.api.http.keys import KeyRing
from stoker_runtime.api.http.openapi import document_route
from stoker_runtime.api.http.validation import query_error
from stoker_runtime.api.limits.ledger import Ledger
from stoker_runtime.api.limits.limiter import HEADERS as LIMIT_HEADERS
from stoker_runtime.api.limits.limiter import RateLimiter
from stoker_runtime.api.limits.rule import Rates
from stoker_runtime.api.messages import routes as messages
from stoker_runtime.api.openai import chat, completions, lora, models, not_here, render, sleep
from stoker_runtime.api.pooling import embeddings, scoring
from stoker_runtime.api.responses import routes as responses
from stoker_runtime.api.responses.background import Shelf
from stoker_runtime.api.responses.store import ResponseStore
from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import AuthenticationError, CapacityError, EngineError, NotFoundError, StokerError
from stoker_runtime.version import VERSION

log = logging.getLogger(__name__)

KEYED = (
    *(chat.router, completions.router, responses.router, messages.router, embeddings.router, scoring.router),
    *(models.router, render.router, batch.router, lora.router, sleep.router, not_here.router, document_route),
)
"""What asks for a key. The first ones are found soonest."""
OPEN = (probes.router, pages.router)
"""What asks for none, and leaves no line in the access log."""
EXPOSED = ("x-request-id", "retry-after", *LIMIT_HEADERS)
"""Headers that a page of another origin may read."""


def _paths(*routers: APIRouter) -> frozenset[str]:
    found = iter_route_contexts(list(chain.from_iterable(router.routes for router in routers)))
    return frozenset(route.path for route in found if route.path is not None)


REQUESTS_A_LINE = 20
"""While requests wait, one in so many in the engine may be a line of a batch."""
QUIET = _paths(*OPEN)
PROBES = _paths(probes.router)
"""What a kubelet and a scraper ask, who have no certificate to show."""
SHAPES: dict[str, Shape] = dict.fromkeys(_paths(messages.router), messages.error_body)


class Application:
    """What serves one server's requests: `api` behind CORS and the edge, and what its routes share."""

    def __init__(self, state: ServerState, store: ResponseStore | None = None, ledger: Ledger | None = None) -> None:
        """`store` and `ledger` may be shared with other processes; without them this process is alone.

        Raises ConfigError.
        """
        config = state.config
        self.shelf = Shelf(store or ResponseStore(config.response_store_bytes))
        self.batches = _batch_runner(state, self.shelf) if config.batch_dir else None
        self.api = make_api(state, self.shelf, self.batches)
        state.limiter = _rate_limiter(state, self.api.state.keys, ledger or Ledger())
        uncertified = PROBES if config.ssl_probes_without_cert else None
        self._edge = Edge(_across_origins(self.api, config), QUIET, config.access_log, uncertified)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._edge(scope, receive, send)


def make_api(state: ServerState, shelf: Shelf, batches: BatchRunner | None) -> FastAPI:
    """The routes over what they share. Raises ConfigError for keys that cannot be read."""
    api = FastAPI(
        title="Stoker", version=VERSION, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    api.state.server, api.state.shelf, api.state.batches = state, shelf, batches
    api.state.keys = KeyRing(state.config.api_keys, state.config.api_key_file, processes=state.config.api_server_count)
    api.state.traced = bool(state.config.otlp_traces_endpoint)
    # An included router is asked as a whole, and then its routes are again: five times the time of a flat list.
    api.router.routes.extend(chain.from_iterable(router.routes for router in (*KEYED, *OPEN)))
    api.add_exception_handler(StokerError, _refused)
    api.add_exception_handler(RequestValidationError, _unreadable)
    api.add_exception_handler(HTTPException, _unrouted)
    api.add_exception_handler(ClientDisconnect, _gone)
    api.add_exception_handler(Exception, _failed)
    return api


def _batch_runner(state: ServerState, shelf: Shelf) -> BatchRunner:
    """What runs batches on this server's own routes. Raises ConfigError when the folder cannot be used."""

    config = state.config

    def room() -> int:
        """How many lines may run. While others wait a share, and never none, or a batch might not end for days."""
        if state.service is None:
            return config.batch_concurrency
        stats = state.service.engine.stats()
        if stats.sleep_level > 0:
            return 0
        share = max(1, (stats.running + stats.waiting) // REQUESTS_A_LINE)
        return share if stats.waiting else config.batch_concurrency

    lines = LineExecutor(state, shelf)
    return BatchRunner(Path(config.batch_dir), lines, room, config.batch_concurrency, config.max_body_bytes)


def _rate_limiter(state: ServerState, keys: KeyRing, ledger: Ledger) -> RateLimiter:
    """What counts rate limits: the server's own, but for owners of whom the file of keys says others."""
    config = state.config

    def rates(owner: str) -> Rates:
        own = keys.allowance(owner)
        return Rates(
            config.rate_limit_requests_per_minute if own.rpm is None else own.rpm,
            config.rate_limit_tokens_per_minute if own.tpm is None else own.tpm,
        )

    return RateLimiter(rates, ledger, state.metrics.rate_limited)


def _across_origins(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )


def _answer(request: Request, error: StokerError) -> Response:
    return error_answer(error, SHAPES.get(request.scope["path"], error_body))


async def _refused(request: Request, error: Exception) -> Response:
    """What a handler or a dependency raised."""
    assert isinstance(error, StokerError)
    if error.status >= 500 and not isinstance(error, CapacityError) and request.scope["path"] not in QUIET:
        log.error("%s: %s", type(error).__name__, error.message, extra={"request_id": request_id(request.scope)})
    return _answer(request, error)


async def _unreadable(request: Request, error: Exception) -> Response:
    """A query, say, that is not what the route declares."""
    assert isinstance(error, RequestValidationError)
    return _answer(request, query_error(error.errors()))


async def _unrouted(request: Request, error: Exception) -> Response:
    """There is no such route, or not for this method; only those who may ask are told."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.scope['path']}"
    try:
        check_key(request)
    except AuthenticationError as refusal:
        return _answer(request, refusal)
    if error.status_code == MethodError.status:
        return _answer(request, MethodError(f"{where}: this method is not allowed here.", _allowed(request)))
    return _answer(request, NotFoundError(f"There is no route {where}."))


def _allowed(request: Request) -> str:
    """The methods of all routes that have the path of `request`."""
    found: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        original = route.original_route
        if original.matches(dict(request.scope))[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


async def _gone(_: Request, error: Exception) -> Response:
    """The client went away before its request was read; nobody reads an answer."""
    return Response(status_code=CLIENT_GONE)


async def _failed(request: Request, error: Exception) -> Response:
    """What nobody expected; the edge writes it to the log."""
    return _answer(request, EngineError("The server failed on this request."))
