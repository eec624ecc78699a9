"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the chat route.

Invariants: errors have Anthropic's shape, also those of the edge (see `error_body`); tokens are counted by the same
template and tokenizer that make a prompt.
Knows nothing of engines: the chat route answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody, ask_within
from stoker_runtime.api.answering.loopback import TranslatedStream, renamed, streamed, whole
from stoker_runtime.api.http.answers import JsonAnswer, json_answer
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.http.sse import named_event
from stoker_runtime.api.messages.body import CountTokensBody, MessagesBody
from stoker_runtime.api.messages.conversation import chat_request, prompt_fields
from stoker_runtime.api.messages.events import Event, MessageBuilder
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.openai.models import tokenize
from stoker_runtime.api.openai.protocol import ChatBody, TokenizeBody
from stoker_runtime.errors import StokerError

router = APIRouter(route_class=Route)
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# By the type that the chat route gives an error in mid-stream.
STREAM_ERROR_TYPES = {"service_unavailable": "overloaded_error", "timeout_error": "timeout_error"}


def error_type(status: int) -> str:
    """What Anthropic calls an error of this status."""
    return ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: StokerError) -> dict[str, Any]:
    """Anthropic's error object."""
    return {"type": "error", "error": {"type": error_type(error.status), "message": error.message}}


@router.post("/v1/messages")
async def create_message(ask: Annotated[Ask[MessagesBody], Depends(ReadBody(MessagesBody))]) -> Response:
    """POST /v1/messages: answer whole or as events. Raises what the chat route raises."""
    state, caller, body = ask
    model = state.check_model(body.model)
    payload, names = await aside(body.size, lambda: chat_request(body, state.sees))
    builder = MessageBuilder(f"msg_{caller.request_id}", model)
    with renamed(names):
        if body.stream:
            # The first event tells the length of the prompt.
            payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        answer = await create_chat_completion(await ask_within(payload, ChatBody, state, caller, body.size))
    if body.stream:
        return TranslatedStream(streamed(answer), MessageEvents(builder))
    return await json_answer(len(answer.body), lambda: _whole(builder, whole(answer)))


def _whole(builder: MessageBuilder, answer: Mapping[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls") or ())]
    builder.add({**choice["message"], "tool_calls": calls})
    builder.finish(choice, answer["usage"])
    return builder.message


@router.post("/v1/messages/count_tokens")
async def count_tokens(ask: Annotated[Ask[CountTokensBody], Depends(ReadBody(CountTokensBody))]) -> Response:
    """POST /v1/messages/count_tokens: the length of the prompt that these messages make."""
    state, caller, body = ask
    payload, names = await aside(body.size, lambda: prompt_fields(body, state.sees))
    if body.tool_choice is not None and body.tool_choice.type == "none":
        payload.pop("tools", None)
    with renamed(names):
        found = whole(await tokenize(await ask_within(payload, TokenizeBody, state, caller, body.size)))
    return JsonAnswer({"input_tokens": found["count"]})


class MessageEvents:
    """The events of one message from the chunks of the chat route."""

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder
        self._begun = False
        self._choice: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}

    def chunk(self, chunk: Mapping[str, Any]) -> str:
        """The events of one chunk."""
        self._usage = chunk["usage"]
        events = [] if self._begun else self._builder.begin(self._usage)
        self._begun = True
        for choice in chunk["choices"]:
            events += self._builder.add(choice["delta"])
            if choice["finish_reason"] is not None:
                self._choice = choice
        return _written(events)

    async def failed(self, error: Mapping[str, Any]) -> str:
        """An error in mid-stream."""
        kind = STREAM_ERROR_TYPES.get(error["type"], "api_error")
        return _written([{"type": "error", "error": {"type": kind, "message": error["message"]}}])

    async def finish(self) -> str:
        """message_delta and message_stop."""
        return _written(self._builder.finish(self._choice, self._usage))


def _written(events: list[Event]) -> str:
    return "".join([named_event(event["type"], event) for event in events])
