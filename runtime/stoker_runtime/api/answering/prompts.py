"""From what a client sent to prompts in token ids that fit the model.

Invariants: every prompt that leaves here is not empty, lies in the vocabulary and leaves room for its answer.
Long texts are encoded in a thread, so that they hold up no stream; one that cannot fit is known by a part of it.
Knows nothing of sampling or of formats.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from stoker_runtime.api.answering.chat_message import ChatMessage
from stoker_runtime.api.answering.content import content_parts, content_text, has_image
from stoker_runtime.api.answering.state import Service
from stoker_runtime.api.generate.generation import Prompt
from stoker_runtime.api.generate.sampling import check_ids
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.fields import SamplingFields
from stoker_runtime.api.tools.history import CallHistory, turns_of, with_tools
from stoker_runtime.errors import ModelError, RequestError
from stoker_runtime.request import Ids
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer

T = TypeVar("T")
# Characters beyond which encoding (about 1 µs each) leaves the event loop.
THREAD_CHARACTERS = 4096
# More than most tokens have, so that one part mostly settles it.
PART_CHARACTERS = 8
MARGIN = 64
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "documents"})


async def encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of `text`."""
    return await off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens))


async def encode_prompt(service: Service, text: str, add_special_tokens: bool, body: SamplingFields) -> Ids:
    """The ids of a prompt, at least as many as `body` lets it keep. Raises RequestError for one that cannot fit."""
    return (await _encode_prompts(service, [text], add_special_tokens, body))[0]


async def _encode_prompts(
    service: Service, texts: Sequence[str], add_special_tokens: bool, body: SamplingFields
) -> list[Ids]:
    longest, truncate = service.limits.max_model_len, body.truncate_prompt_tokens
    keep = truncate if truncate and truncate > 0 else longest
    from_end = bool(truncate) and body.truncation_side != "right"

    def encode_all() -> list[Ids]:
        parts = [a_part(service.tokenizer, text, add_special_tokens, keep, from_end=from_end) for text in texts]
        if not truncate and (long := next((part for part in parts if part is not None), None)) is not None:
            raise too_long(longest, len(long[1]), "prompt")
        whole = [text for text, part in zip(texts, parts, strict=True) if part is None]
        ids = iter(service.tokenizer.encode_many(whole, add_special_tokens))
        return [tuple(next(ids) if part is None else part[1]) for part in parts]

    return await off_loop(sum(map(len, texts)), encode_all)


def too_long(longest: int, tokens: int, field: str) -> RequestError:
    """The error for a text of which a part has so many tokens."""
    return RequestError(
        f"This model's maximum context length is {longest} tokens. However, {field} has more than {tokens} tokens. "
        "Shorten it, or set truncate_prompt_tokens.",
        param=field,
        code="context_length_exceeded",
    )


def a_part(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int, *, from_end: bool = False
) -> tuple[str, list[int]] | None:
    """A part of a long `text`, from its beginning or end, and its ids, which are more than `keep`; else None.

    Encoding megabytes takes seconds and their ids hundreds of them; a part tells that a text is too long, and holds
    what is kept of it. A cut changes the tokens beside it, hence the margin.
    """
    size = max(keep * PART_CHARACTERS, THREAD_CHARACTERS)
    while 2 * size < len(text):
        part = text[-size:] if from_end else text[:size]
        ids = tokenizer.encode(part, add_special_tokens)
        if len(ids) > keep + MARGIN:
            return part, ids
        size *= 4
    return None


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """Do `work` on so much text in a thread where it would hold up streams."""
    return await asyncio.to_thread(work) if characters > THREAD_CHARACTERS else work()


async def completion_prompts(
    service: Service, inputs: Sequence[str | list[int]], add_special_tokens: bool, body: SamplingFields
) -> list[Prompt]:
    """The prompts of /v1/completions: texts are encoded as `encode_prompt` does, ids are checked."""

    def check() -> list[Ids]:
        ids = [given for given in inputs if not isinstance(given, str)]
        for given in ids:
            check_ids("prompt", given, service.limits.vocab_size)
        return [tuple(given) for given in ids]

    given_ids = iter(await aside(body.size, check))
    texts = [given for given in inputs if isinstance(given, str)]
    encoded = iter(await _encode_prompts(service, texts, add_special_tokens, body))
    return [Prompt(next(encoded), given) if isinstance(given, str) else Prompt(next(given_ids)) for given in inputs]


def fit(prompt: Prompt, asked: int | None, body: SamplingFields, service: Service) -> tuple[Prompt, int]:
    """The prompt, cut to so many tokens as `body` says (-1: to what fits), and how many tokens may follow.

    It keeps its end, or where the truncation side is "right" its beginning. `asked` None means all that the context
    leaves, at most the model's own cap. Raises RequestError when they do not fit together.
    """
    longest, truncate, cap = service.limits.max_model_len, body.truncate_prompt_tokens, service.defaults.max_new_tokens
    reserved = 1 if asked is None else asked
    if truncate is not None:
        keep = max(longest - reserved, 1) if truncate == -1 else truncate
        if 0 < keep < len(prompt.ids):
            if prompt.images:
                raise RequestError(
                    f"truncate_prompt_tokens would cut the prompt's {len(prompt.ids)} tokens, and a prompt with images "
                    "is not cut. Leave something out.",
                    param="truncate_prompt_tokens",
                )
            right = body.truncation_side == "right"
            prompt = Prompt(prompt.ids[:keep] if right else prompt.ids[-keep:])
    length = len(prompt.ids)
    if not length:
        raise RequestError("The prompt is empty.", param="prompt")
    if length + reserved > longest:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, you requested {length + reserved} "
            f"tokens ({length} in the prompt, {reserved} in the completion). Shorten the prompt or the completion.",
            param="prompt" if length + 1 > longest else "max_tokens",
            code="context_length_exceeded",
        )
    room = longest - length
    if asked is not None:
        return prompt, asked
    return prompt, room if cap is None else min(room, cap)


def template_messages(
    messages: Sequence[ChatMessage],
    history: CallHistory,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    sees: bool = False,
) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: texts joined, calls and `tools` as its `history` says.

    Where the model `sees`, the parts of messages with images stay parts.
    """
    found = [_template_message(message, f"messages[{at}]", history, sees) for at, message in enumerate(messages)]
    if history.as_turns:
        found = [turn for message in found for turn in turns_of(message)]
    if not (tools and history.tools_in_message):
        return found
    return with_tools(found, tools, as_text=history.tools_as_text)


def _template_message(message: ChatMessage, where: str, history: CallHistory, sees: bool) -> dict[str, Any]:
    content: str | list[dict[str, Any]]
    if sees and isinstance(message.content, list) and has_image(message.content):
        content = content_parts(message.content, f"{where}.content")
    else:
        content = content_text(message.content, f"{where}.content")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is required for the role {message.role!r}.", param=f"{where}.content")
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            found[name] = value
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if history.thinking:
            found["thinking"] = reasoning
    if message.tool_calls:
        if history.one_text and reasoning and found["content"]:
            found |= {"thinking": f"{reasoning}\n{found['content']}", "content": ""}
        if history.null_content and not found["content"]:
            found["content"] = None
        found["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{at}]", history) for at, call in enumerate(message.tool_calls)
        ]
    return found


def _tool_call(call: Mapping[str, Any], where: str, history: CallHistory) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function must be an object with a name.", param=f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            raise RequestError(
                f"{where}.function.arguments is not valid JSON.", param=f"{where}.function.arguments"
            ) from None
    arguments = arguments if arguments is not None else {}
    if history.argument_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def effort_variables(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What templates are told of a wanted effort: the effort itself, and whether to think at all, unless `given`."""
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", **(given or {}), "reasoning_effort": effort}


def chosen_template(service: Service, source: str | None, trusted: bool) -> ChatTemplate:
    """The template of a request: its own `source`, where such are trusted, or the server's. Raises RequestError."""
    if source is None:
        return service.template
    if not trusted:
        raise RequestError(
            "chat_template is taken from requests only by a server that runs with --trust-request-chat-template; "
            "leave it out.",
            param="chat_template",
        )
    try:
        return ChatTemplate({"default": source}, service.tokenizer.special_tokens, "The request")
    except ModelError as error:
        raise RequestError(error.message, param="chat_template") from error


def check_template_variables(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """chat_template_kwargs, refused when they would replace what the request itself says."""
    for name in sorted(RESERVED_VARIABLES & set(extra or ())):
        raise RequestError(
            f"chat_template_kwargs must not hold {name}; it is a field of its own.", param="chat_template_kwargs"
        )
    return extra or {}
