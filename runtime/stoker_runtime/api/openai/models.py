"""The small routes of a model: its name, and its tokenizer.

Knows nothing of generating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody, State
from stoker_runtime.api.answering.prompts import (
    a_part,
    check_template_variables,
    chosen_template,
    off_loop,
    template_messages,
)
from stoker_runtime.api.answering.seen import sources_of
from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.generate.sampling import check_ids
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.openai.protocol import DetokenizeBody, TokenizeBody
from stoker_runtime.api.tools.tools import shown_tools
from stoker_runtime.errors import RequestError
from stoker_runtime.images.source import ImageSource
from stoker_runtime.text.chat_template import ChatTemplate

router = APIRouter(route_class=Route)
MAX_COUNTED = 1 << 18
"""Tokens of one text, unless a sequence of the model may be longer."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _model(state: ServerState, name: str) -> dict[str, Any]:
    limits = state.service.limits if state.service else None
    adapter = state.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "stoker",
        "root": adapter.path if adapter else state.config.engine.model,
        "parent": (adapter.parent or state.model_names[0]) if adapter else None,
        "max_model_len": limits.max_model_len if limits else None,
        "permission": [],
    }


@router.get("/v1/models")
async def list_models(state: State) -> Response:
    """GET /v1/models: the model's names, then the adapters."""
    names = (*state.model_names, *state.adapters)
    return JsonAnswer({"object": "list", "data": [_model(state, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def get_model(state: State, name: str) -> Response:
    """GET /v1/models/NAME. Raises NotFoundError."""
    return JsonAnswer(_model(state, state.check_model(name)))


@router.post("/tokenize")
async def tokenize(ask: Annotated[Ask[TokenizeBody], Depends(ReadBody(TokenizeBody))]) -> Response:
    """POST /tokenize: the ids of a prompt, or of messages through the chat template."""
    state, _, body = ask
    state.check_model(body.model)
    service = state.loaded()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        template = chosen_template(service, body.chat_template, state.config.trust_request_chat_template)
        sources = sources_of(service, body.messages, mm_processor_kwargs=body.mm_processor_kwargs)
        text = await aside(body.size, lambda: _conversation(service, body, template))
        ids = await _conversation_ids(service, text, sources, bool(body.add_special_tokens))
    else:
        ids = await _ids(service, body.prompt or "", body.add_special_tokens is not False, "prompt")

    def answer() -> Response:
        spelled = [service.tokenizer.id_to_token(at) for at in ids] if body.return_token_strs else None
        return JsonAnswer(
            {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids, "token_strs": spelled}
        )

    return await aside(body.size, answer)


def _conversation(service: Service, body: TokenizeBody, template: ChatTemplate) -> str:
    """The messages as one text."""
    tools = shown_tools(body.tools or ())
    return template.render(
        template_messages(body.messages or (), service.dialect.history, tools, sees=service.images is not None),
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        extra=check_template_variables(body.chat_template_kwargs),
    )


async def _conversation_ids(
    service: Service, text: str, sources: Sequence[ImageSource], add_special_tokens: bool
) -> list[int]:
    """The ids of a rendered conversation, those of its images included. Raises RequestError."""
    images = service.images
    if images is None or not sources:
        return await _ids(service, text, add_special_tokens, "messages")
    written = images.placeholders.write(text, len(sources))
    ids = await _ids(service, written, add_special_tokens, "messages")
    loaded = await images.load(sources, max(MAX_COUNTED, service.limits.max_model_len) - len(ids))
    return list(images.placeholders.expand(ids, loaded)[0])


async def _ids(service: Service, text: str, add_special_tokens: bool, field: str) -> list[int]:
    """The ids of a text of any length that a model may read. Raises RequestError for a longer one."""
    most = max(MAX_COUNTED, service.limits.max_model_len)

    def encoded() -> list[int]:
        part = a_part(service.tokenizer, text, add_special_tokens, most)
        ids = service.tokenizer.encode(text, add_special_tokens) if part is None else part[1]
        if len(ids) <= most:
            return ids
        raise RequestError(
            f"{field} has more than {most} tokens, which is the most that is counted at a time; send it in parts.",
            param=field,
        )

    return await off_loop(len(text), encoded)


@router.post("/detokenize")
async def detokenize(ask: Annotated[Ask[DetokenizeBody], Depends(ReadBody(DetokenizeBody))]) -> Response:
    """POST /detokenize: the text of ids."""
    state, _, body = ask
    state.check_model(body.model)
    service = state.loaded()

    def answer() -> Response:
        check_ids("tokens", body.tokens, service.limits.vocab_size)
        return JsonAnswer({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})

    return await aside(body.size, answer)


@router.get("/tokenizer_info")
async def tokenizer_info(state: State) -> Response:
    """GET /tokenizer_info: the names of special tokens and the chat template, for clients that tokenize through us."""
    service = state.loaded()
    names = {name: service.tokenizer.special_tokens.get(name) for name in SPECIAL_TOKENS}
    return JsonAnswer({"tokenizer_class": "stoker", **names, "chat_template": service.template.source or None})
