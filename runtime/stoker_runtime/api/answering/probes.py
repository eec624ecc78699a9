"""What probes, scrapers and load balancers ask: no key is wanted, and nothing is logged.

Invariants: `/health` is 200 only while the engine process takes steps (or idles with a heartbeat); `/ready` only
while the server takes new requests, which is after a warm-up completion and before a drain.
Knows nothing of generating.
"""

from __future__ import annotations

import asyncio
import os

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker_runtime.api.answering.intake import State
from stoker_runtime.api.answering.state import Phase
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.routing import OpenRoute
from stoker_runtime.metrics import CONTENT_TYPE
from stoker_runtime.request import EngineStats
from stoker_runtime.version import VERSION

DESCRIPTORS = "/proc/self/fd"

router = APIRouter(route_class=OpenRoute)


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> Response:
    """GET /health and /ping: whether the engine lives. 503 while it starts, when it died and when it hangs.

    It says how long the step that is awaited has taken: as long as the slowest of its ranks.
    """
    engine = state.loaded().engine
    engine.check_health()
    return JsonAnswer({"status": "ok", "phase": state.phase, "step_age_seconds": round(engine.stats().step_age, 2)})


@router.get("/ready")
async def ready(request: Request, state: State) -> Response:
    """GET /ready: whether to send requests here, what is wrong nevertheless, and what became of listed adapters."""
    state.require_ready().engine.check_health()
    followed = state.followed
    problems = [request.app.state.keys.problem(), followed.problem if followed is not None else ""]
    warnings = [problem for problem in problems if problem]
    answer = {"status": "ready"} | ({"warnings": warnings} if warnings else {})
    return JsonAnswer(answer if followed is None else answer | {"adapters": followed.reports()})


@router.get("/version")
async def version() -> Response:
    """GET /version: the program's version."""
    return JsonAnswer({"version": VERSION})


@router.get("/load")
async def load(state: State) -> Response:
    """GET /load: requests under way, the engine's own view of them, and what the process that answers holds."""
    engine = state.service.engine if state.service else None
    stats = engine.stats() if engine else EngineStats()
    return JsonAnswer(
        {
            "server_load": state.load,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_pages": stats.pages_used,
            "host_kv_pages": stats.host_pages_used,
            "ready": state.phase is Phase.READY,
            "process": {
                "pid": os.getpid(),
                "requests": engine.open_requests if engine else 0,
                "tasks": len(asyncio.all_tasks()),
                "descriptors": len(os.listdir(DESCRIPTORS)),
            },
        }
    )


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(state.metrics.expose(), headers={"content-type": CONTENT_TYPE.decode()})
