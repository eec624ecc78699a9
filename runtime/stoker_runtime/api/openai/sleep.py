"""The routes that put the engine to sleep and wake it, as vLLM spells them.

They decide for all clients of the server, so a server has to be told that it may sleep; without that there are none.
Knows nothing of what sleep gives back, and how.
"""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from stoker_runtime.api.answering.intake import State
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.routing import Route
from stoker_runtime.errors import NotFoundError, RequestError

router = APIRouter(route_class=Route)

log = logging.getLogger(__name__)

MODES = {"wait": False, "abort": True}
"""Whether what runs is cut short."""


@router.post("/sleep")
async def sleep(state: State, level: Annotated[int, Query()] = 1, mode: Annotated[str, Query()] = "wait") -> Response:
    """POST /sleep: take no requests, and once none runs give the GPU's memory back; `mode` wait or abort."""
    engine = _sleepy(state)
    if mode not in MODES:
        more = "; requests are not held while it sleeps" if mode == "keep" else ""
        raise RequestError(f"mode is {mode!r:.40}; it must be {' or '.join(MODES)}{more}.", param="mode")
    await engine.sleep(level, abort=MODES[mode])
    log.info("asleep at level %d", level)
    return Response()


@router.post("/wake_up")
async def wake_up(state: State, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """POST /wake_up: take the memory again; of `tags` weights and kv_cache those that are named."""
    engine = _sleepy(state)
    await engine.wake_up(tags or ())
    log.info("woken up: %s", ", ".join(tags or ("all",)))
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(state: State) -> Response:
    """GET /is_sleeping: whether memory is given back, and nobody is answered until it is woken up."""
    return JsonAnswer({"is_sleeping": bool(_sleepy(state).stats().asleep)})


def _sleepy(state: ServerState) -> EngineClient:
    """The engine. Raises NotFoundError where it was not started to sleep, UnavailableError while it starts."""
    if not state.config.engine.enable_sleep_mode:
        raise NotFoundError("This server does not sleep; start it with --enable-sleep-mode.")
    return state.loaded().engine
