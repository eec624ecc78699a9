"""What probes, scrapers and load balancers ask: no key is wanted, and nothing is logged.

Invariants: `/health` is 200 only while the engine process takes steps (or idles with a heartbeat); `/ready` only
while the server takes new requests, which is after a warm-up completion and before a drain.
Knows nothing of generating.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker_runtime.api.answering.intake import State
from stoker_runtime.api.answering.state import Phase
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.routing import OpenRoute
from stoker_runtime.metrics import CONTENT_TYPE
from stoker_runtime.version import VERSION

router = APIRouter(route_class=OpenRoute)


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> Response:
    """GET /health and /ping: whether the engine lives. 503 while it starts, when it died and when it hangs."""
    state.loaded().engine.check_health()
    return JsonAnswer({"status": "ok", "phase": state.phase})


@router.get("/ready")
async def ready(request: Request, state: State) -> Response:
    """GET /ready: whether to send requests here, and what is wrong nevertheless."""
    state.require_ready().engine.check_health()
    problem = request.app.state.keys.problem()
    return JsonAnswer({"status": "ready"} | ({"warnings": [problem]} if problem else {}))


@router.get("/version")
async def version() -> Response:
    """GET /version: the program's version."""
    return JsonAnswer({"version": VERSION})


@router.get("/load")
async def load(state: State) -> Response:
    """GET /load: requests under way, and the engine's own view of them."""
    stats = state.service.engine.stats() if state.service else None
    return JsonAnswer(
        {
            "server_load": state.load,
            "running": stats.running if stats else 0,
            "waiting": stats.waiting if stats else 0,
            "ready": state.phase is Phase.READY,
        }
    )


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(state.metrics.expose(), headers={"content-type": CONTENT_TYPE.decode()})
