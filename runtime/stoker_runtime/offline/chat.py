"""Conversations in this process, behind `LLM.chat`: messages become prompts the way the chat route makes them.

Invariants: messages and tools are read and checked as that route reads them.
Knows nothing of engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stoker_runtime.api.answering.prompts import check_template_variables, template_messages
from stoker_runtime.api.http.validation import parse_body
from stoker_runtime.api.openai.protocol import TokenizeBody
from stoker_runtime.api.tools.history import call_history
from stoker_runtime.api.tools.tools import shown_tools
from stoker_runtime.errors import RequestError
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What goes to the template besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] | None = None


class Conversations:
    """A chat template and what is known of it."""

    def __init__(self, tokenizer: Tokenizer, model: str, override: str | None = None) -> None:
        """`override` is the template's source in place of the model's own. Raises ModelError."""
        named = {"default": override} if override else tokenizer.chat_templates
        self._template = ChatTemplate(named, tokenizer.special_tokens, model)
        self._history = call_history(self._template)

    def prompt(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The text of one conversation. Raises RequestError, also where there is no template, or none for tools."""
        given: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        if options.tools:
            given["tools"] = list(options.tools)
        try:
            body = parse_body(json.dumps(given).encode(), TokenizeBody)
        except TypeError as error:
            raise RequestError(f"Messages must be plain data: {error}.", param="messages") from error
        if body.tools and "tools" not in self._template.source:
            raise RequestError("This model's chat template has no place for tools.", param="tools")
        tools = shown_tools(body.tools) if body.tools else None
        return self._template.render(
            template_messages(body.messages or [], self._history, tools),
            tools=tools,
            add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
            continue_final_message=options.continue_final_message,
            extra=check_template_variables(options.extra),
        )


def conversations(messages: Messages) -> list[Sequence[Message]]:
    """Several conversations, also when one was given."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))
