"""POST /v1/chat/completions: messages through the model's chat template, streamed or whole.

Invariants: the first event of each choice carries the role; a streamed answer, put together, equals the whole one.
Knows nothing of the engine beyond `Generation`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.content import content_text
from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.answering.prompts import (
    check_template_variables,
    chosen_template,
    effort_variables,
    fit,
    template_messages,
)
from stoker_runtime.api.answering.seen import conversation_prompt, sources_of
from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.answering.streams import EventStream, collect
from stoker_runtime.api.answering.work import check_stream_options, let_through, make_work, public_id
from stoker_runtime.api.constraints.structured import Asked, asked_constraints, checked
from stoker_runtime.api.generate.generation import Answers, Delta, Prompt, Work, merge
from stoker_runtime.api.http.answers import Later, json_answer, written_in_ascii
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.http.sse import event, json_line, json_text
from stoker_runtime.api.openai.answer import AnswerParser, Reading, delta_message, plan_reading, whole_message
from stoker_runtime.api.openai.completions import finish_part
from stoker_runtime.api.openai.logprobs import TOKEN_BYTES, LogprobFormat, answer_size, logprob_bytes
from stoker_runtime.api.openai.protocol import ChatBody
from stoker_runtime.api.openai.usage import StreamUsage, usage
from stoker_runtime.api.tools.forced_calls import forced_constraint, told
from stoker_runtime.api.tools.tools import ToolUse, tool_use
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions")
async def create_chat_completion(ask: Annotated[Ask[ChatBody], Depends(ReadBody(ChatBody))]) -> Response:
    """Answer one request. Raises RequestError, CapacityError or EngineError."""
    state, caller, body = ask
    service = state.require_service()
    work, layout = await chat_work(state, service, body)
    work = let_through(state, caller, work)
    if body.stream:
        return EventStream(state, service, work, partial(ChatStream, layout))
    with state.generate(service, work) as generation:
        deltas = await collect(caller.receive, generation)
        return await json_answer(layout.size(generation), lambda: layout.whole(deltas, generation))


async def chat_work(state: ServerState, service: Service, body: ChatBody) -> tuple[Work, ChatFormat]:
    """What a body asks of the engine, checked whole, and how its answer looks. Raises RequestError."""
    model = state.check_model(body.model)
    check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    template = chosen_template(service, body.chat_template, state.config.trust_request_chat_template)

    sources = sources_of(
        service, body.messages, mm_processor_kwargs=body.mm_processor_kwargs, media_io_kwargs=body.media_io_kwargs
    )

    def render() -> tuple[ToolUse, str]:
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, service.dialect, template.source)
        return use, _text(service, body, use, template)

    use, text = await aside(body.size, render)
    # The template writes the special tokens itself, unless the client says that it does not.
    rendered = await conversation_prompt(service, text, sources, bool(body.add_special_tokens), body)
    reading = _reading(service, body, use, rendered)
    constraint = await _constraint(service, body, use, reading)
    prompt, max_tokens = fit(rendered, asked, body, service)
    answer_id = public_id("chatcmpl", body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    work = await make_work(service, body, [prompt], max_tokens, logprobs, answer_id, constraint)
    work = replace(work, visible=reading.visible(service.tokenizer))
    return work, ChatFormat(body, answer_id, model, service.tokenizer, reading, _echoed(body))


def _reading(service: Service, body: ChatBody, use: ToolUse, prompt: Prompt) -> Reading:
    """How the answers are read."""
    continued: str | None = None
    if body.continue_final_message:
        continued = template_messages(body.messages[-1:], service.dialect.history)[0]["content"]
    return plan_reading(service.dialect, use, prompt.text or "", continued, body.include_reasoning is not False)


async def _constraint(service: Service, body: ChatBody, use: ToolUse, reading: Reading) -> Constraint | None:
    """What the answers must match: a forced call's schema, or what the body asks for, after any reasoning."""

    def find() -> tuple[Constraint | None, list[Asked]]:
        return forced_constraint(use, harmony=reading.harmony), asked_constraints(service.tokenizer, body)

    forced, asked = await aside(body.size, find)
    if forced is None and not asked:
        return None
    # A response format is about content: a model that may call may do that instead.
    lead = reading.lead(service.tokenizer, calls=use.choice == "auto" and body.response_format is not None)
    if forced is None:
        return await checked(service.constraints, service.tokenizer, asked, lead)
    # A response_format is about content, of which an answer that must be a call has none.
    other = next((name for name, _ in asked if not name.startswith("response_format")), None)
    if other is not None:
        raise RequestError(f"tool_choice {use.choice!r} and {other} exclude each other.", param=other)
    forced = forced if reading.harmony else replace(forced, lead=lead)
    return await service.constraints.check(forced, service.tokenizer, "tools")


def _echoed(body: ChatBody) -> str:
    """What stands before an answer that repeats the last message, which has to be the assistant's."""
    last = body.messages[-1]
    return content_text(last.content, "messages") if body.echo and last.role == "assistant" else ""


def _text(service: Service, body: ChatBody, use: ToolUse, template: ChatTemplate) -> str:
    """The conversation as one text."""
    continued = bool(body.continue_final_message)
    generate = body.add_generation_prompt is not False
    if continued and generate:
        if body.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        generate = False
    extra = {**check_template_variables(body.chat_template_kwargs), "documents": body.documents}
    extra |= effort_variables(body.reasoning_effort, body.chat_template_kwargs)
    messages = template_messages(
        body.messages, service.dialect.history, use.shown(), sees=service.images is not None
    )
    if use.forced and "tools" not in template.source:
        messages = told(messages, use)
    return template.render(
        messages,
        tools=use.shown(),
        add_generation_prompt=generate,
        continue_final_message=continued,
        extra=extra,
    )


def finish_reason(delta: Delta, called: bool) -> str | None:
    """Why a choice ended: a call is a reason of its own, unless it was cut short."""
    return "tool_calls" if called and delta.finish == "stop" else delta.finish


class ChatFormat:
    """How the answers to one request look."""

    def __init__(
        self, body: ChatBody, answer_id: str, model: str, tokenizer: Tokenizer, reading: Reading, echoed: str = ""
    ) -> None:
        """`echoed` stands before the content of every choice."""
        self.echoed = echoed
        self.body = body
        self.reading = reading
        self.created = int(time.time())
        self.answer_id = answer_id
        self.model = model
        self._tokenizer = tokenizer
        self._logprobs = LogprobFormat(tokenizer, bool(body.return_tokens_as_token_ids))

    def frame(self, kind: str) -> dict[str, Any]:
        """What stands in every object of the answer."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def size(self, generation: Answers) -> int:
        """About how many bytes the whole answer has."""
        body = self.body
        return answer_size(generation, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)

    def whole(self, deltas: Sequence[Delta], generation: Answers) -> dict[str, Any]:
        """The whole answer."""
        merged = merge(deltas, generation.work)
        prompt = generation.work.prompts[0]
        answer = {
            **self.frame("chat.completion"),
            "choices": [self._choice(delta) for delta in merged],
            "usage": usage(generation),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = Later(
                partial(self._logprobs.prompt, prompt.ids, merged[0].prompt_logprobs)
            )
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(prompt.ids)
        if self.body.return_prompt_text:
            answer["prompt_text"] = self.prompt_text(prompt)
        return answer

    def prompt_text(self, prompt: Prompt) -> str:
        """The prompt as the chat template made it, or as much of it as was left."""
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.ids, skip_special=False)

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The logprobs object of `delta`."""
        return self._logprobs.chat(delta.tokens, delta.logprobs) if self.body.logprobs else None

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message, called = whole_message(self.reading, delta.text)
        if self.echoed:
            message["content"] = self.echoed + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": message,
            "logprobs": Later(partial(self.logprobs, delta)) if self.body.logprobs else None,
            "finish_reason": finish_reason(delta, called),
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(delta.tokens)
        return choice


class ChatStream:
    """The events of one streamed answer."""

    def __init__(self, layout: ChatFormat, generation: Answers) -> None:
        self._layout = layout
        self._usage = StreamUsage(layout.body.stream_options, generation)
        frame = layout.frame("chat.completion.chunk")
        self._head = f'data: {json.dumps(frame, ensure_ascii=False, separators=(",", ":"))[:-1]},"choices":[{{"index":'
        self._prompt = generation.work.prompts[0]
        self._plain = not (layout.body.logprobs or layout.body.return_token_ids)
        self._greeted = [False] * generation.work.n
        reading = layout.reading
        self._parsers = None if reading.plain else [AnswerParser(reading) for _ in self._greeted]

    def size(self, deltas: Sequence[Delta]) -> int:
        """About how many bytes of these events are log-probabilities, ids, and prompts."""
        body, told = self._layout.body, 0
        if body.return_token_ids or body.return_prompt_text:
            told = sum([len(self._prompt.ids) for delta in deltas if not self._greeted[delta.index]])
        elif self._plain:
            return 0
        top = (body.top_logprobs or 0) if body.logprobs else None
        tokens = sum([len(delta.tokens) for delta in deltas])
        return told * TOKEN_BYTES + tokens * (TOKEN_BYTES + logprob_bytes(top))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The role once a choice, then one event a delta; one that says nothing is left out."""
        return "".join([self._event(delta) for delta in deltas]).encode()

    def closing(self) -> bytes:
        """The usage event, where it was asked for."""
        if not self._usage.last:
            return b""
        return event({**self._layout.frame("chat.completion.chunk"), "choices": [], "usage": self._usage.now()})

    def _event(self, delta: Delta) -> str:
        greeting = "" if self._greeted[delta.index] else self._greeting(delta.index)
        if self._parsers is None:
            said = f'{{"content":{json_text(delta.text)}}}' if delta.text else "{}"
        else:
            parser = self._parsers[delta.index]
            said = json_line(delta_message(parser.read(delta.text, delta.finish is not None)))
            delta = replace(delta, finish=finish_reason(delta, parser.called))
        if self._plain:
            if said == "{}" and delta.finish is None and not self._usage.each:
                return greeting
            logprobs = '"logprobs":null'
        else:
            logprobs = f'"logprobs":{written_in_ascii(self._layout.logprobs(delta))}'
            if self._layout.body.return_token_ids:
                logprobs += f',"token_ids":{json.dumps(list(delta.tokens))}'
        return (
            f'{greeting}{self._head}{delta.index},"delta":{said},{logprobs},'
            f"{finish_part(delta)}}}]{self._usage.part(len(delta.tokens))}}}\n\n"
        )

    def _prompt_part(self, prompt: Prompt) -> str:
        """What the first event tells of the prompt, where it was asked for."""
        body, part = self._layout.body, ""
        if body.return_token_ids:
            part += f',"prompt_token_ids":{written_in_ascii(prompt.ids)}'
        if body.return_prompt_text:
            part += f',"prompt_text":{json_text(self._layout.prompt_text(prompt))}'
        return part

    def _greeting(self, index: int) -> str:
        """The role, and what is repeated."""
        self._greeted[index] = True
        head, tail = f'{self._head}{index},"delta":', '"logprobs":null,"finish_reason":null}]'
        usage = self._usage.part(0)
        greeting = f'{head}{{"role":"assistant","content":""}},{tail}{self._prompt_part(self._prompt)}{usage}}}\n\n'
        if not self._layout.echoed:
            return greeting
        return f'{greeting}{head}{{"content":{json_text(self._layout.echoed)}}},{tail}{usage}}}\n\n'
