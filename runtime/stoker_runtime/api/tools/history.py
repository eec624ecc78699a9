"""What a chat template expects of tools and of earlier calls: found out by rendering small conversations.

Invariants: a template for which calls come out in no known way gets them as objects; what it refuses counts as not
coming out.
Knows nothing of requests, nor of how calls are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker_runtime.errors import RequestError
from stoker_runtime.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class CallHistory:
    """What a template expects of earlier messages with calls.

    `argument_text`: arguments as JSON text, not as an object. `null_content`: no content as null, not as "".
    `thinking`: it shows reasoning that has this name; `one_text`: either that or a content, and refuses both.
    `as_turns`: each call as a message of its own, see `turns_of`. `tools_in_message`: the tools as a key of the
    system's message, and not beside the messages; `tools_as_text`: there as JSON text.
    """

    argument_text: bool = False
    null_content: bool = False
    thinking: bool = False
    one_text: bool = False
    as_turns: bool = False
    tools_in_message: bool = False
    tools_as_text: bool = False


AS_OBJECTS = CallHistory()
PROBE = {"needle": "hay"}
THOUGHT = "haystack"
CALLED = "straw"
SAYS = "it says where it was"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": SAYS, "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"role": "user", "content": "probe"}


def turns_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message for a template in which calls are turns: a turn has a name as its `metadata` and arguments as its
    content, and a result is an `observation`. The calls of `message` have their arguments as text.
    """
    if message["role"] == "tool":
        return [{**message, "role": "observation"}]
    calls = message.get("tool_calls") or ()
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    turns = [
        {"role": message["role"], "metadata": call["function"]["name"], "content": call["function"]["arguments"]}
        for call in calls
    ]
    return [said, *turns] if said["content"] or not turns else turns


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, as_text: bool = False
) -> list[dict[str, Any]]:
    """`messages` with the tools as a key of the system's message, which comes first; `as_text`: as JSON text."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    there: Any = json.dumps(tools, ensure_ascii=False) if as_text else list(tools)
    return [{**first, "tools": there}, *map(dict, messages[1:] if has_system else messages)]


def call_history(template: ChatTemplate) -> CallHistory:
    """How `template` wants earlier calls: the first way in which a call's arguments come out, and as JSON."""
    ways = [CallHistory(text, null) for null in (False, True) for text in (False, True)]
    ways.append(CallHistory(argument_text=True, as_turns=True))
    found = next((way for way in ways if _comes_out(template, way)), AS_OBJECTS)
    thinking = THOUGHT in _probed(template, found, thinking=THOUGHT)
    within: list[bool] = []
    if SAYS not in _rendered(template, [ASKED]):
        # Text first: a template that joins it refuses a list, and one that walks through a list finds none in letters.
        within = [as_text for as_text in (True, False) if _shows_tools_within(template, as_text=as_text)]
    return replace(
        found,
        thinking=thinking, one_text=thinking and not _probed(template, found, thinking=THOUGHT, content=THOUGHT),
        tools_in_message=bool(within), tools_as_text=within[:1] == [True],
    )  # fmt: skip


def _shows_tools_within(template: ChatTemplate, *, as_text: bool) -> bool:
    """Whether tools come out as a key of the system's message: text as it is, a list not as Python's `repr`."""
    found = _rendered(template, with_tools([ASKED], [PROBE_TOOL], as_text=as_text))
    whole = '"probe"' in found if as_text else str(PROBE_TOOL["function"]) not in found
    return SAYS in found and whole


def _comes_out(template: ChatTemplate, way: CallHistory) -> bool:
    """Whether a conversation with one call shows its arguments, not as Python's `repr` would."""
    text = _probed(template, way)
    # As a message's content, arguments come out everywhere; the name of their call does not.
    words = ("needle", "hay", CALLED) if way.as_turns else ("needle", "hay")
    return all(word in text for word in words) and str(PROBE) not in text


def _probed(template: ChatTemplate, way: CallHistory, **more: str) -> str:
    """The prompt of a conversation with one call, whose message has `more`; "" where the template refuses it."""
    arguments: Any = json.dumps(PROBE) if way.argument_text else PROBE
    call = {"id": "probe1234", "type": "function", "function": {"name": CALLED, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        ASKED,
        {"role": "assistant", "content": None if way.null_content else "", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "probe1234", "name": "probe", "content": "probe"},
    ]
    if way.as_turns:
        messages = [turn for message in messages for turn in turns_of(message)]
    return _rendered(template, messages)


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt of `messages`, with a tool; "" where the template refuses it."""
    try:
        return template.render(messages, tools=[PROBE_TOOL])
    except RequestError:
        return ""
