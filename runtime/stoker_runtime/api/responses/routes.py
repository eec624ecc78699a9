"""POST /v1/responses and what clients do with a response afterwards: the Responses API over the chat route.

Invariants: a response is stored once it is over, however it ended, and one in the background from its beginning on;
whichever of the server's processes is asked about it, it answers. Only one in the background can be cancelled.
Knows nothing of engines: the chat route answers.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from stoker_runtime.api.answering.loopback import TranslatedStream, ask, ask_stream, inner_request, renamed
from stoker_runtime.api.answering.prompts import effort_variables
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.http import Request, Response, json_response
from stoker_runtime.api.http.paging import page
from stoker_runtime.api.http.validation import parse_body
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.openai.protocol import TokenizeBody
from stoker_runtime.api.openai.service_routes import tokenize
from stoker_runtime.api.responses.background import EventReplay, end_job, start_job
from stoker_runtime.api.responses.body import ResponsesBody
from stoker_runtime.api.responses.conversation import Item, chat_request, input_items
from stoker_runtime.api.responses.events import ResponseBuilder
from stoker_runtime.api.responses.making import CHAT, Asked, ResponseEvents, finished, streaming
from stoker_runtime.api.responses.store import Stored
from stoker_runtime.errors import RequestError

MAX_DIGITS = 16
STREAM_QUERY: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1},
}


async def create_response(state: ServerState, request: Request) -> Response | TranslatedStream | EventReplay:
    """POST /v1/responses: answer whole, as events, or in the background. Raises what the chat route raises."""
    asked = await _read(state, await request.body(state.config.max_body_bytes))
    if asked.body.background:
        begun = await start_job(state, request, asked)
        return EventReplay(state.responses, begun["id"]) if asked.body.stream else json_response(begun)
    with renamed(asked.names):
        if asked.body.stream:
            inner = inner_request(request, CHAT, streaming(asked.payload))
            stream = await ask_stream(create_chat_completion, state, inner)
            return TranslatedStream(stream, inner, ResponseEvents(state, asked))
        answer = await ask(create_chat_completion, state, inner_request(request, CHAT, asked.payload))
    builder = ResponseBuilder(asked.stored.response)
    _take(builder, answer)
    await finished(state, builder, answer["choices"][0]["finish_reason"], answer["usage"])
    if asked.keep:
        await asyncio.to_thread(state.responses.put, asked.stored)
    return json_response(builder.response)


async def count_input_tokens(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt that such a request makes. Raises RequestError."""
    asked = await _read(state, await request.body(state.config.max_body_bytes))
    payload = {name: value for name, value in asked.payload.items() if name in TokenizeBody.model_fields}
    if asked.payload.get("tool_choice") == "none":
        payload.pop("tools", None)
    if "reasoning_effort" in asked.payload:
        given = payload.get("chat_template_kwargs") or {}
        payload["chat_template_kwargs"] = {**given, **effort_variables(asked.payload["reasoning_effort"], given)}
    with renamed(asked.names):
        found = await ask(tokenize, state, inner_request(request, "/tokenize", payload))
    return json_response({"object": "response.input_tokens", "input_tokens": found["count"]})


async def get_response(state: ServerState, request: Request) -> Response | EventReplay:
    """GET /v1/responses/ID, or with `stream=true` the events of one made in the background. Raises NotFoundError."""
    stored = await asyncio.to_thread(state.responses.get, request.name)
    after, wanted = request.query.get("starting_after"), request.query.get("stream", "false")
    if wanted not in ("true", "false"):
        raise RequestError(f"stream must be true or false; got {wanted[:40]!r}.", param="stream")
    if wanted == "false":
        if after is not None:
            raise RequestError("starting_after is only allowed when stream is true.", param="starting_after")
        return json_response(stored.response)
    if not stored.response["background"]:
        raise RequestError(
            "Only a response that was created with background=true can be streamed again.", param="stream"
        )
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
        raise RequestError(f"starting_after must be an event's number; got {after[:40]!r}.", param="starting_after")
    return EventReplay(state.responses, request.name, -1 if after is None else int(after))


async def list_input_items(state: ServerState, request: Request) -> Response:
    """GET /v1/responses/ID/input_items: what the response was asked with. Raises NotFoundError."""
    return json_response(page(request, (await asyncio.to_thread(state.responses.get, request.name)).items))


async def delete_response(state: ServerState, request: Request) -> Response:
    """DELETE /v1/responses/ID; one that still runs is cancelled. Raises NotFoundError."""
    await asyncio.to_thread(state.responses.get, request.name)
    await end_job(state.responses, request.name)
    await asyncio.to_thread(state.responses.discard, request.name)
    return json_response({"id": request.name, "object": "response", "deleted": True})


async def cancel_response(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/ID/cancel. Raises NotFoundError, or RequestError where nothing runs in the background."""
    stored = await asyncio.to_thread(state.responses.get, request.name)
    if not stored.response["background"]:
        raise RequestError("Only a response that was created with background=true can be cancelled.")
    await end_job(state.responses, request.name)
    return json_response((await asyncio.to_thread(state.responses.get, request.name)).response)


def _take(builder: ResponseBuilder, answer: Mapping[str, Any]) -> None:
    """Let the response grow by a whole answer of the chat route."""
    message, logprobs = answer["choices"][0]["message"], answer["choices"][0].get("logprobs") or {}
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    builder.begin()
    builder.add({**message, "tool_calls": calls}, logprobs.get("content") or ())


async def _read(state: ServerState, raw: bytes) -> Asked:
    """Check a request. Raises RequestError or NotFoundError."""
    body = parse_body(raw, ResponsesBody)
    model = state.check_model(body.model)
    store = state.responses
    for name in ("store", "background"):
        if getattr(body, name):
            store.require(name)
    keep = body.store is not False and bool(store.max_bytes)
    if body.background and not keep:
        raise RequestError("background is only allowed where the response is stored.", param="background")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    name = f"resp_{body.request_id or uuid.uuid4().hex}"
    taken = await asyncio.to_thread(store.known, name)
    if taken:
        raise RequestError("There is a response of this request_id already.", param="request_id")
    history: list[Item] = []
    if body.previous_response_id:
        history = (await asyncio.to_thread(store.previous, body.previous_response_id)).conversation()
    items = input_items(body)
    payload, names = chat_request(body, json.loads(raw), history, items)
    response = _beginning(state, body, model, name, keep)
    stored = Stored(response, [_listed(item) for item in items], history)
    return Asked(body, {**payload, "request_id": name}, names, stored, keep)


def _listed(item: Item) -> Item:
    """An input item as it is listed: with a type, an id and its content in parts."""
    kind = item.get("type") or "message"
    found = {"id": f"{'msg' if kind == 'message' else 'item'}_{uuid.uuid4().hex}", **item, "type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": item["content"]}]
    return found


def _beginning(state: ServerState, body: ResponsesBody, model: str, name: str, keep: bool) -> dict[str, Any]:
    """The response before anything was said."""
    defaults = state.require_service().defaults
    text = body.text.model_dump(by_alias=True, exclude_unset=True) if body.text else {}
    reasoning = body.reasoning or None
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": keep,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
