"""POST /v1/responses and what clients do with a response afterwards: the Responses API over the chat route.

Invariants: a response is stored once it is over, however it ended; one that runs in the background outlives its
request, and only such a one can be cancelled.
Knows nothing of engines: the chat route answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_runtime.api.chat import create_chat_completion
from stoker_runtime.api.edge import error_body
from stoker_runtime.api.http import Message, Request, Response, json_response
from stoker_runtime.api.loopback import (
    TranslatedStream,
    Translation,
    ask,
    ask_stream,
    inner_request,
    named_event,
    renamed,
)
from stoker_runtime.api.paging import page
from stoker_runtime.api.prompts import encode
from stoker_runtime.api.protocol import TokenizeBody
from stoker_runtime.api.responses.body import ResponsesBody
from stoker_runtime.api.responses.conversation import Item, chat_request, input_items
from stoker_runtime.api.responses.events import Event, ResponseBuilder, response_usage
from stoker_runtime.api.responses.store import Job, Stored
from stoker_runtime.api.service_routes import tokenize
from stoker_runtime.api.sse import EventStream, json_line
from stoker_runtime.api.state import ServerState
from stoker_runtime.api.validation import parse_body
from stoker_runtime.errors import EngineError, RequestError, StokerError

log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: its body, the chat request it stands for, and the response as it begins."""

    body: ResponsesBody
    payload: dict[str, Any]
    names: list[tuple[str, str]]
    stored: Stored
    keep: bool


async def create_response(state: ServerState, request: Request) -> Response | TranslatedStream:
    """POST /v1/responses: answer whole, as events, or in the background. Raises what the chat route raises."""
    asked = _read(state, await request.body(state.config.max_body_bytes))
    if asked.body.background:
        return json_response(await _start_job(state, request, asked))
    with renamed(asked.names):
        if asked.body.stream:
            inner = inner_request(request, CHAT, _streaming(asked.payload))
            stream = await ask_stream(create_chat_completion, state, inner)
            return TranslatedStream(stream, inner, ResponseEvents(state, asked))
        answer = await ask(create_chat_completion, state, inner_request(request, CHAT, asked.payload))
    builder = ResponseBuilder(asked.stored.response)
    _take(builder, answer)
    await _finish(state, builder, answer["choices"][0]["finish_reason"], answer["usage"])
    _keep(state, asked)
    return json_response(builder.response)


async def count_input_tokens(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt that such a request makes. Raises RequestError."""
    asked = _read(state, await request.body(state.config.max_body_bytes))
    payload = {name: value for name, value in asked.payload.items() if name in TokenizeBody.model_fields}
    if asked.payload.get("tool_choice") == "none":
        payload.pop("tools", None)
    if "reasoning_effort" in asked.payload:
        effort = {"reasoning_effort": asked.payload["reasoning_effort"]}
        payload["chat_template_kwargs"] = {**(payload.get("chat_template_kwargs") or {}), **effort}
    with renamed(asked.names):
        found = await ask(tokenize, state, inner_request(request, "/tokenize", payload))
    return json_response({"object": "response.input_tokens", "input_tokens": found["count"]})


async def get_response(state: ServerState, request: Request) -> Response:
    """GET /v1/responses/ID. Raises NotFoundError."""
    if request.query.get("stream") == "true":
        raise RequestError("A stream cannot be taken up again on this server.", param="stream")
    return json_response(state.responses.get(request.name).response)


async def list_input_items(state: ServerState, request: Request) -> Response:
    """GET /v1/responses/ID/input_items: what the response was asked with. Raises NotFoundError."""
    return json_response(page(request, state.responses.get(request.name).items))


async def delete_response(state: ServerState, request: Request) -> Response:
    """DELETE /v1/responses/ID; one that still runs is cancelled. Raises NotFoundError."""
    state.responses.get(request.name)
    await _cancel(state, request.name)
    state.responses.discard(request.name)
    return json_response({"id": request.name, "object": "response", "deleted": True})


async def cancel_response(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/ID/cancel. Raises NotFoundError, or RequestError where nothing runs in the background."""
    stored = state.responses.get(request.name)
    if not stored.response["background"]:
        raise RequestError("Only a response that was created with background=true can be cancelled.")
    await _cancel(state, request.name)
    return json_response(stored.response)


async def _cancel(state: ServerState, name: str) -> None:
    """End a response in the background, if it runs."""
    job = state.responses.jobs.get(name)
    if job is not None and job.task is not None:
        job.cancelled.set()
        await asyncio.wait({job.task})


async def _start_job(state: ServerState, request: Request, asked: Asked) -> dict[str, Any]:
    """Let a response be made in the background; what it is like now. Raises what is wrong with the request."""
    job = Job(asked.stored, asyncio.Event())

    async def receive() -> Message:
        await job.cancelled.wait()
        return {"type": "http.disconnect"}

    inner = inner_request(request, CHAT, _streaming(asked.payload), receive)
    with renamed(asked.names):
        stream = await ask_stream(create_chat_completion, state, inner)
    response = asked.stored.response
    state.responses.jobs[response["id"]] = job
    job.task = asyncio.create_task(_run_job(state, asked, job, stream, inner))
    return dict(response)


async def _run_job(state: ServerState, asked: Asked, job: Job, stream: EventStream, inner: Request) -> None:
    """Take all events of `stream`; what comes out is kept."""
    events = ResponseEvents(state, asked, job.cancelled)
    translation = Translation(events)

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.body":
            await translation(message["body"])

    try:
        await stream.send(inner, forward)
    except StokerError as error:
        events.failed(error_body(error)["error"])
    except Exception:
        log.exception("A response in the background failed.", extra={"request_id": inner.request_id})
        events.failed(error_body(EngineError("The server failed on this request."))["error"])
    finally:
        del state.responses.jobs[asked.stored.response["id"]]


def _take(builder: ResponseBuilder, answer: Mapping[str, Any]) -> None:
    """Let the response grow by a whole answer of the chat route."""
    message, logprobs = answer["choices"][0]["message"], answer["choices"][0].get("logprobs") or {}
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    builder.begin()
    builder.add({**message, "tool_calls": calls}, logprobs.get("content") or ())


def _streaming(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {**payload, "stream": True, "stream_options": {"include_usage": True}}


def _read(state: ServerState, raw: bytes) -> Asked:
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
    if body.background and body.stream:
        raise RequestError("background and stream exclude each other on this server.", param="background")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    name = f"resp_{body.request_id or uuid.uuid4().hex}"
    if name in store:
        raise RequestError("There is a response of this request_id already.", param="request_id")
    previous = store.previous(body.previous_response_id) if body.previous_response_id else None
    history = previous.conversation() if previous else []
    items = input_items(body)
    payload, names = chat_request(body, json.loads(raw), history, items)
    response = _beginning(state, body, model, name, keep)
    # It counts what came before it too, for it keeps that alive.
    stored = Stored(response, [_listed(item) for item in items], history, previous.size if previous else 0)
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
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": keep,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


async def _finish(state: ServerState, builder: ResponseBuilder, reason: str, usage: Mapping[str, Any]) -> list[Event]:
    """The last events of a response that did not fail."""
    events = builder.close(reason)
    texts = [item["content"][0]["text"] for item in builder.response["output"] if item["type"] == "reasoning"]
    tokens = sum([len(await encode(state.loaded(), text, False)) for text in texts])
    return [*events, builder.finish(reason, response_usage(usage, tokens))]


def _keep(state: ServerState, asked: Asked) -> None:
    if asked.keep:
        state.responses.put(asked.stored)


class ResponseEvents:
    """The events of one response from the chunks of the chat route. `cancelled` is set when its end is wanted."""

    def __init__(self, state: ServerState, asked: Asked, cancelled: asyncio.Event | None = None) -> None:
        self._state = state
        self._asked = asked
        self._cancelled = cancelled
        self._builder = ResponseBuilder(asked.stored.response)
        self._begun = False
        self._reason = "stop"
        self._usage: dict[str, Any] = {}

    def _begin(self) -> list[Event]:
        begun, self._begun = self._begun, True
        return [] if begun else self._builder.begin()

    def chunk(self, chunk: Mapping[str, Any]) -> str:
        """The events of one chunk."""
        events = self._begin()
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            logprobs = choice.get("logprobs") or {}
            events += self._builder.add(choice["delta"], logprobs.get("content") or ())
            self._reason = choice["finish_reason"] or self._reason
        return _written(events)

    def failed(self, error: Mapping[str, Any]) -> str:
        """response.failed, after what is open is closed."""
        events = self._begin()
        if self._cancelled is not None and self._cancelled.is_set():
            self._builder.cancel()
        else:
            events += self._builder.fail(error)
        _keep(self._state, self._asked)
        return _written(events)

    async def finish(self) -> str:
        """response.completed or response.incomplete."""
        events = await _finish(self._state, self._builder, self._reason, self._usage)
        _keep(self._state, self._asked)
        return _written(events)


def _written(events: list[Event]) -> str:
    return "".join([named_event(event["type"], event, json_line) for event in events])
