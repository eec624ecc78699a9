"""The small routes: models, tokenize and detokenize, and what probes, scrapers and load balancers ask.

Invariants: `/health` is 200 only while the engine process takes steps (or idles with a heartbeat); `/ready` only
while the server takes new requests, which is after a warm-up completion and before a drain.
Knows nothing of generating.
"""

from __future__ import annotations

from typing import Any

from stoker_runtime.api.answering.intake import read_request
from stoker_runtime.api.answering.prompts import check_template_variables, chosen_template, encode, template_messages
from stoker_runtime.api.answering.state import Phase, ServerState
from stoker_runtime.api.generate.sampling import check_ids
from stoker_runtime.api.http.edge import error_response
from stoker_runtime.api.http.http import Request, Response, json_response
from stoker_runtime.api.openai.protocol import DetokenizeBody, TokenizeBody
from stoker_runtime.api.tools.tools import shown_tools
from stoker_runtime.errors import RequestError, StokerError
from stoker_runtime.metrics import CONTENT_TYPE
from stoker_runtime.version import VERSION

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _model(state: ServerState, name: str) -> dict[str, Any]:
    limits = state.service.limits if state.service else None
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "stoker",
        "root": state.config.engine.model,
        "parent": None,
        "max_model_len": limits.max_model_len if limits else None,
        "permission": [],
    }


async def list_models(state: ServerState, _: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(state, name) for name in state.model_names]})


async def get_model(state: ServerState, request: Request) -> Response:
    """GET /v1/models/NAME. Raises NotFoundError."""
    return json_response(_model(state, state.check_model(request.name)))


async def tokenize(state: ServerState, request: Request) -> Response:
    """POST /tokenize: the ids of a prompt, or of messages through the chat template."""
    body = await read_request(state, request, TokenizeBody)
    state.check_model(body.model)
    service = state.loaded()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        template = chosen_template(service, body.chat_template, state.config.trust_request_chat_template)
        text = template.render(
            template_messages(body.messages, service.dialect.history),
            tools=shown_tools(body.tools or ()),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            extra=check_template_variables(body.chat_template_kwargs),
        )
        ids = await encode(service, text, bool(body.add_special_tokens))
    else:
        ids = await encode(service, body.prompt or "", body.add_special_tokens is not False)
    spelled = [service.tokenizer.id_to_token(at) for at in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids, "token_strs": spelled}
    )


async def detokenize(state: ServerState, request: Request) -> Response:
    """POST /detokenize: the text of ids."""
    body = await read_request(state, request, DetokenizeBody)
    state.check_model(body.model)
    service = state.loaded()
    check_ids("tokens", body.tokens, service.limits.vocab_size)
    return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})


async def tokenizer_info(state: ServerState, _: Request) -> Response:
    """GET /tokenizer_info: the names of special tokens and the chat template, for clients that tokenize through us."""
    service = state.loaded()
    names = {name: service.tokenizer.special_tokens.get(name) for name in SPECIAL_TOKENS}
    return json_response({"tokenizer_class": "stoker", **names, "chat_template": service.template.source or None})


async def health(state: ServerState, _: Request) -> Response:
    """GET /health and /ping: whether the engine lives. 503 while it starts, when it died and when it hangs."""
    try:
        state.loaded().engine.check_health()
    except StokerError as error:
        return error_response(error)
    return json_response({"status": "ok", "phase": state.phase})


async def ready(state: ServerState, _: Request) -> Response:
    """GET /ready: whether to send requests here."""
    try:
        state.require_ready().engine.check_health()
    except StokerError as error:
        return error_response(error)
    return json_response({"status": "ready"})


async def version(state: ServerState, _: Request) -> Response:
    """GET /version: the program's version."""
    return json_response({"version": VERSION})


async def load(state: ServerState, _: Request) -> Response:
    """GET /load: requests under way, and the engine's own view of them."""
    stats = state.service.engine.stats() if state.service else None
    return json_response(
        {
            "server_load": state.load,
            "running": stats.running if stats else 0,
            "waiting": stats.waiting if stats else 0,
            "ready": state.phase is Phase.READY,
        }
    )


async def metrics(state: ServerState, _: Request) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(state.metrics.expose(), CONTENT_TYPE)
