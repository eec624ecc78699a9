"""The routes that load and unload adapters while requests run.

They let a caller name a folder of the server's, so a server has to be told that it may (as vLLM has to).
Knows nothing of how adapters are read or kept.
"""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.http.fields import Body, Integer
from stoker_runtime.api.http.routing import Route
from stoker_runtime.errors import RequestError, UnsupportedError

router = APIRouter(route_class=Route)

log = logging.getLogger(__name__)


class LoadBody(Body):
    """POST /v1/load_lora_adapter: a PEFT folder and the name that clients are to call it by."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Integer | None = None


@router.post("/v1/load_lora_adapter")
async def load_adapter(ask: Annotated[Ask[LoadBody], Depends(ReadBody(LoadBody))]) -> Response:
    """POST /v1/load_lora_adapter: serve a PEFT folder of the server's under a name; `load_inplace` replaces one."""
    state, _, body = ask
    engine = _allowed(state)
    if not body.lora_name or not body.lora_path:
        raise RequestError(
            "Both 'lora_name' and 'lora_path' must be provided.",
            param="lora_path" if body.lora_name else "lora_name",
        )
    if body.lora_name in state.model_names:
        raise RequestError(f"{body.lora_name!r} is the model's own name.", param="lora_name")
    await engine.load_adapter(
        body.lora_name, body.lora_path, parent=body.base_model_name or "", replace=bool(body.load_inplace)
    )
    log.info("adapter %s is served", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(ask: Annotated[Ask[UnloadBody], Depends(ReadBody(UnloadBody))]) -> Response:
    """POST /v1/unload_lora_adapter: take no new requests for an adapter; those that there are go on."""
    state, _, body = ask
    engine = _allowed(state)
    await engine.unload_adapter(body.lora_name)
    log.info("adapter %s is not served any more", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(state: ServerState) -> EngineClient:
    """The engine, to change what it serves. Raises UnsupportedError where that was not allowed at the start."""
    if not state.config.allow_runtime_lora_updating:
        raise UnsupportedError(
            "Adapters cannot be loaded or unloaded while this server runs; start it with --enable-lora and "
            "--allow-runtime-lora-updating."
        )
    return state.require_service().engine
