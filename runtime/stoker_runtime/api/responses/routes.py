"""POST /v1/responses and what clients do with a response afterwards: the Responses API over the chat route.

Invariants: a response is stored once it is over, however it ended, and one in the background from its beginning on;
whichever of the server's processes is asked about it, it answers. Only one in the background can be cancelled.
Knows nothing of engines: the chat route answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadRaw, ask_within, read_body
from stoker_runtime.api.answering.loopback import TranslatedStream, renamed, streamed, whole
from stoker_runtime.api.answering.prompts import effort_variables
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.answers import JsonAnswer, json_answer, made_now
from stoker_runtime.api.http.aside import LARGE_BYTES, aside
from stoker_runtime.api.http.caller import Owner
from stoker_runtime.api.http.paging import PageQuery, page
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.http.validation import sent
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.openai.models import tokenize
from stoker_runtime.api.openai.protocol import ChatBody, TokenizeBody
from stoker_runtime.api.responses.background import EventReplay, Shelf, end_job, start_job
from stoker_runtime.api.responses.body import ResponsesBody
from stoker_runtime.api.responses.conversation import Item, chat_request, input_items
from stoker_runtime.api.responses.events import ResponseBuilder
from stoker_runtime.api.responses.making import Asked, ResponseEvents, finished, streaming
from stoker_runtime.api.responses.store import ResponseStore, Stored
from stoker_runtime.errors import RequestError

MAX_DIGITS = 16
router = APIRouter(route_class=Route)


async def _shelf(request: Request) -> Shelf:
    found: Shelf = request.app.state.shelf
    return found


Kept = Annotated[Shelf, Depends(_shelf)]
Asking = Annotated[Ask[bytes], Depends(ReadRaw(ResponsesBody))]


@router.post("/v1/responses")
async def create_response(ask: Asking, shelf: Kept) -> Response:
    """POST /v1/responses: answer whole, as events, or in the background. Raises what the chat route raises."""
    state, caller, raw = ask
    asked = await _read(state, shelf.store, caller.owner, raw)
    if asked.body.background:
        begun = await start_job(state, shelf, caller, asked)
        return EventReplay(shelf.store, begun["id"], caller.owner) if asked.body.stream else JsonAnswer(begun)
    payload = streaming(asked.payload) if asked.body.stream else asked.payload
    with renamed(asked.names):
        made = await create_chat_completion(await ask_within(payload, ChatBody, state, caller, asked.size))
    if asked.body.stream:
        return TranslatedStream(streamed(made), ResponseEvents(state, shelf.store, asked))
    answer = whole(made)
    builder = ResponseBuilder(asked.stored.response)
    _take(builder, answer)
    await finished(state, builder, answer["choices"][0]["finish_reason"], answer["usage"])
    if asked.keep:
        await asyncio.to_thread(shelf.store.put, asked.stored)
    return await json_answer(len(made.body), lambda: builder.response)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(ask: Asking, shelf: Kept) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt that such a request makes. Raises RequestError."""
    state, caller, raw = ask
    asked = await _read(state, shelf.store, caller.owner, raw)
    payload = {name: value for name, value in asked.payload.items() if name in TokenizeBody.model_fields}
    if asked.payload.get("tool_choice") == "none":
        payload.pop("tools", None)
    if "reasoning_effort" in asked.payload:
        given = payload.get("chat_template_kwargs") or {}
        payload["chat_template_kwargs"] = {**given, **effort_variables(asked.payload["reasoning_effort"], given)}
    with renamed(asked.names):
        found = whole(await tokenize(await ask_within(payload, TokenizeBody, state, caller, asked.size)))
    return JsonAnswer({"object": "response.input_tokens", "input_tokens": found["count"]})


@router.get("/v1/responses/{name}")
async def get_response(
    shelf: Kept,
    owner: Owner,
    name: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=10**MAX_DIGITS)] = None,
) -> Response:
    """GET /v1/responses/ID, or with `stream=true` the events of one made in the background. Raises NotFoundError."""
    stored = await asyncio.to_thread(shelf.store.get, name, owner)
    if not stream:
        if starting_after is not None:
            raise RequestError("starting_after is only allowed when stream is true.", param="starting_after")
        return JsonAnswer(stored.response)
    if not stored.response["background"]:
        raise RequestError(
            "Only a response that was created with background=true can be streamed again.", param="stream"
        )
    return EventReplay(shelf.store, name, owner, -1 if starting_after is None else starting_after)


@router.get("/v1/responses/{name}/input_items")
async def list_input_items(shelf: Kept, owner: Owner, name: str, query: PageQuery) -> Response:
    """GET /v1/responses/ID/input_items: what the response was asked with. Raises NotFoundError."""
    return JsonAnswer(page(query, (await asyncio.to_thread(shelf.store.get, name, owner)).items))


@router.delete("/v1/responses/{name}")
async def delete_response(shelf: Kept, owner: Owner, name: str) -> Response:
    """DELETE /v1/responses/ID; one that still runs is cancelled. Raises NotFoundError."""
    await asyncio.to_thread(shelf.store.get, name, owner)
    await end_job(shelf.store, name, owner)
    await asyncio.to_thread(shelf.store.discard, name, owner)
    return JsonAnswer({"id": name, "object": "response", "deleted": True})


@router.post("/v1/responses/{name}/cancel")
async def cancel_response(shelf: Kept, owner: Owner, name: str) -> Response:
    """POST /v1/responses/ID/cancel. Raises NotFoundError, or RequestError where nothing runs in the background."""
    stored = await asyncio.to_thread(shelf.store.get, name, owner)
    if not stored.response["background"]:
        raise RequestError("Only a response that was created with background=true can be cancelled.")
    await end_job(shelf.store, name, owner)
    return JsonAnswer((await asyncio.to_thread(shelf.store.get, name, owner)).response)


def _take(builder: ResponseBuilder, answer: Mapping[str, Any]) -> None:
    """Let the response grow by a whole answer of the chat route."""
    message, logprobs = answer["choices"][0]["message"], made_now(answer["choices"][0].get("logprobs")) or {}
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    builder.begin()
    builder.add({**message, "tool_calls": calls}, logprobs.get("content") or ())


async def _read(state: ServerState, store: ResponseStore, owner: str, raw: bytes) -> Asked:
    """Check a request. Raises RequestError or NotFoundError."""
    body = await read_body(raw, ResponsesBody, state)
    model = state.check_model(body.model)
    for name in ("store", "background"):
        if getattr(body, name):
            store.require(name)
    keep = body.store is not False and bool(store.max_bytes)
    if body.background and not keep:
        raise RequestError("background is only allowed where the response is stored.", param="background")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    name = f"resp_{body.request_id or uuid.uuid4().hex}"
    taken = await asyncio.to_thread(store.known, name, owner)
    if taken:
        raise RequestError("There is a response of this request_id already.", param="request_id")
    history: list[Item] = []
    if body.previous_response_id:
        history = (await asyncio.to_thread(store.previous, body.previous_response_id, owner)).conversation()
    response = _beginning(state, body, model, name, keep)
    # What was said before may be of any size.
    size = LARGE_BYTES + 1 if history else body.size

    def asked() -> Asked:
        items = input_items(body)
        payload, names = chat_request(body, sent(raw), history, items)
        stored = Stored(response, [_listed(item) for item in items], history, owner=owner)
        return Asked(body, {**payload, "request_id": body.request_id}, names, stored, keep, size)

    return await aside(size, asked)


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
