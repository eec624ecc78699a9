"""POST /v1/completions: prompts as text or ids, several at once, streamed or whole.

Invariants: choice index is prompt · n + choice; a streamed answer, put together, equals the whole one.
Knows nothing of the engine beyond `Generation`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.answering.prompts import completion_prompts, fit
from stoker_runtime.api.answering.state import Service
from stoker_runtime.api.answering.streams import EventStream, collect
from stoker_runtime.api.answering.work import check_stream_options, let_through, make_work, public_id
from stoker_runtime.api.constraints.structured import read_constraint
from stoker_runtime.api.generate.generation import Answers, Delta, Prompt, Work, merge
from stoker_runtime.api.http.answers import Later, json_answer, written_in_ascii
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.http.sse import event, json_text
from stoker_runtime.api.openai.logprobs import TOKEN_BYTES, LogprobFormat, answer_size, logprob_bytes
from stoker_runtime.api.openai.protocol import CompletionBody
from stoker_runtime.api.openai.usage import StreamUsage, usage
from stoker_runtime.request import TokenLogprobs
from stoker_runtime.text.tokenizer import Tokenizer

router = APIRouter(route_class=Route)


@router.post("/v1/completions")
async def create_completion(ask: Annotated[Ask[CompletionBody], Depends(ReadBody(CompletionBody))]) -> Response:
    """Answer one request. Raises RequestError, CapacityError or EngineError."""
    state, caller, body = ask
    model = state.check_model(body.model)
    service = state.require_service()
    work, asked = await completion_work(service, body)
    layout = CompletionFormat(body, work.label, model, service.tokenizer, silent=asked == 0)
    work = let_through(state, caller, work)
    if body.stream:
        return EventStream(state, service, work, partial(CompletionStream, layout))
    with state.generate(service, work) as generation:
        deltas = await collect(caller.receive, generation)
        return await json_answer(layout.size(generation), lambda: layout.whole(deltas, generation))


async def completion_work(service: Service, body: CompletionBody) -> tuple[Work, int]:
    """What a body asks of the engine, checked whole, and how many tokens it asks for. Raises RequestError."""
    check_stream_options(body)
    constraint = await read_constraint(service.constraints, service.tokenizer, body)
    prompts, asked = await _prompts(service, body)
    # The engine gives nothing for nothing: an answer of no tokens is one token that is not shown.
    answer_id = public_id("cmpl", body)
    work = await make_work(service, body, prompts, max(asked, 1), body.logprobs, answer_id, constraint)
    work = replace(work, operation="text_completion")
    if body.echo and body.logprobs is not None:
        asked_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
        work = replace(work, params=replace(work.params, prompt_logprobs=asked_logprobs))
    return work, asked


async def _prompts(service: Service, body: CompletionBody) -> tuple[list[Prompt], int]:
    """The prompts, and the tokens that each may get."""
    found = await completion_prompts(service, body.prompt, body.add_special_tokens is not False, body)
    fitted = [fit(prompt, body.max_tokens, body, service) for prompt in found]
    return [prompt for prompt, _ in fitted], min(tokens for _, tokens in fitted)


@dataclass(slots=True)
class Progress:
    """How far one streamed choice has come: whether its first event went out, and the length of its text."""

    started: bool = False
    offset: int = 0


class CompletionFormat:
    """How the answers to one request look. `silent`: the generated token stays hidden."""

    def __init__(
        self, body: CompletionBody, answer_id: str, model: str, tokenizer: Tokenizer, silent: bool = False
    ) -> None:
        self.body = body
        self.silent = silent
        self.created = int(time.time())
        self.answer_id = answer_id
        self.model = model
        self._tokenizer = tokenizer
        self._logprobs = LogprobFormat(tokenizer, bool(body.return_tokens_as_token_ids))

    def size(self, generation: Answers) -> int:
        """About how many bytes the whole answer has."""
        body = self.body
        echoed = body.logprobs if body.echo else None
        return answer_size(generation, body.logprobs, body.prompt_logprobs if echoed is None else echoed)

    def whole(self, deltas: Sequence[Delta], generation: Answers) -> dict[str, Any]:
        """The whole answer."""
        prompts, keep = generation.work.prompts, generation.work.keep
        return {
            **self.frame(),
            "choices": [self._choice(delta, prompts[delta.index // keep]) for delta in merge(deltas, generation.work)],
            "usage": usage(generation, self.silent),
        }

    def frame(self) -> dict[str, Any]:
        """What stands in every object of the answer."""
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, delta: Delta, prompt: Prompt) -> dict[str, Any]:
        body = self.body
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": self.text(delta, prompt, first=True),
            "logprobs": None
            if body.logprobs is None
            else Later(partial(self.logprobs, delta, prompt, 0, first=True)),
            "finish_reason": "length" if self.silent else delta.finish,
            "stop_reason": None if self.silent else delta.stop_reason,
        }
        if body.prompt_logprobs is not None:
            narrow = _narrow(delta.prompt_logprobs, body.prompt_logprobs)
            choice["prompt_logprobs"] = Later(partial(self._logprobs.prompt, prompt.ids, narrow))
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(prompt.ids), "token_ids": list(self._tokens(delta))}
        return choice

    def _tokens(self, delta: Delta) -> tuple[int, ...]:
        return () if self.silent else delta.tokens

    def text(self, delta: Delta, prompt: Prompt, first: bool) -> str:
        """The text of `delta`, after the prompt's where it is echoed."""
        text = "" if self.silent else delta.text
        if not (self.body.echo and first):
            return text
        return self.prompt_text(prompt) + text

    def prompt_text(self, prompt: Prompt) -> str:
        """The prompt as text, which for ids is what they decode to."""
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.ids, skip_special=False)

    def logprobs(self, delta: Delta, prompt: Prompt, offset: int, first: bool) -> dict[str, list[Any]] | None:
        """The logprobs object of `delta`, whose text starts at `offset`."""
        asked = self.body.logprobs
        if asked is None:
            return None
        tokens = self._tokens(delta)
        found: tuple[TokenLogprobs | None, ...] = delta.logprobs[: len(tokens)]
        if self.body.echo and first:
            tokens = prompt.ids + tokens
            found = (None, *_narrow(delta.prompt_logprobs, asked), *found)
        return self._logprobs.completion(tokens, found, offset)


def _narrow(found: Sequence[TokenLogprobs], top: int) -> list[TokenLogprobs]:
    """Log-probabilities with at most `top` alternatives each."""
    return [entry if len(entry.top) <= top else replace(entry, top=entry.top[:top]) for entry in found]


class CompletionStream:
    """The events of one streamed answer."""

    def __init__(self, layout: CompletionFormat, generation: Answers) -> None:
        self._layout = layout
        self._work = generation.work
        body = layout.body
        self._usage = StreamUsage(body.stream_options, generation, layout.silent)
        frame = json.dumps(layout.frame(), ensure_ascii=False, separators=(",", ":"))
        self._head = f'data: {frame[:-1]},"choices":[{{"index":'
        # Most streams need nothing but text: their events take the short way.
        self._plain = not (body.echo or body.return_token_ids or layout.silent) and body.logprobs is None
        self._progress = [Progress() for _ in range(len(self._work.prompts) * self._work.n)]

    def size(self, deltas: Sequence[Delta]) -> int:
        """About how many bytes of these events are log-probabilities, ids, and prompts."""
        if self._plain:
            return 0
        return sum([self._size(delta) for delta in deltas])

    def _size(self, delta: Delta) -> int:
        body, tokens, prompt = self._layout.body, len(delta.tokens), 0
        if not self._progress[delta.index].started and (body.echo or body.return_token_ids):
            prompt = len(self._work.prompts[delta.index // self._work.n].ids)
        return (tokens + prompt) * (TOKEN_BYTES + logprob_bytes(body.logprobs))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """One event a delta; one that says nothing is left out."""
        write = self._plain_event if self._plain else self._full_event
        return "".join([write(delta) for delta in deltas]).encode()

    def closing(self) -> bytes:
        """The usage event, where it was asked for."""
        if not self._usage.last:
            return b""
        return event({**self._layout.frame(), "choices": [], "usage": self._usage.now()})

    def _plain_event(self, delta: Delta) -> str:
        if not delta.text and delta.finish is None and not self._usage.each:
            return ""
        return (
            f'{self._head}{delta.index},"text":{json_text(delta.text)},"logprobs":null,'
            f"{finish_part(delta)}}}]{self._usage.part(len(delta.tokens))}}}\n\n"
        )

    def _full_event(self, delta: Delta) -> str:
        layout, progress = self._layout, self._progress[delta.index]
        prompt, first = self._work.prompts[delta.index // self._work.n], not progress.started
        text = layout.text(delta, prompt, first)
        logprobs = layout.logprobs(delta, prompt, progress.offset, first)
        progress.started = True
        progress.offset += len(text)
        extra = ""
        if layout.body.return_token_ids:
            given = list(prompt.ids) if first else None
            extra = f',"prompt_token_ids":{written_in_ascii(given)},"token_ids":{json.dumps(list(delta.tokens))}'
        if layout.silent:
            delta = replace(delta, finish=delta.finish and "length", stop_reason=None)
        return (
            f'{self._head}{delta.index},"text":{json_text(text)},"logprobs":{written_in_ascii(logprobs)}{extra},'
            f"{finish_part(delta)}}}]{self._usage.part(len(delta.tokens))}}}\n\n"
        )


def finish_part(delta: Delta) -> str:
    """The end of a choice: why it finished, if it did."""
    if delta.finish is None:
        return '"finish_reason":null'
    return f'"finish_reason":"{delta.finish}","stop_reason":{_ascii(delta.stop_reason)}'


def _ascii(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
