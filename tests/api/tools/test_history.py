"""What chat templates expect of tools and earlier calls, and how they get it."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import (
    COMMAND_R,
    DEEPSEEK,
    GLM,
    GLM4,
    GLM4_OF_2024,
    HERMES,
    PASTES,
    PHI4_MINI,
    THINKS,
    THINKS_OR_SAYS,
)

from stoker_runtime.api.tools.history import AS_OBJECTS, CallHistory, call_history, turns_of, with_tools
from stoker_runtime.text.chat_template import ChatTemplate

SAYS_CONTENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools | tojson }}"


@pytest.mark.parametrize(
    ("source", "history"),
    [
        (HERMES, AS_OBJECTS),
        (GLM, AS_OBJECTS),
        (PASTES, CallHistory(argument_text=True)),
        (COMMAND_R, AS_OBJECTS),
        (GLM4, CallHistory(argument_text=True, as_turns=True)),
        (GLM4_OF_2024, CallHistory(argument_text=True, as_turns=True, tools_in_message=True)),
        (PHI4_MINI, CallHistory(tools_in_message=True, tools_as_text=True)),
        ("{{ messages[0].tools | tojson }}", CallHistory(tools_in_message=True)),
        ("{{ messages[0].tools }}", CallHistory(tools_in_message=True, tools_as_text=True)),
        (SAYS_CONTENT, AS_OBJECTS),
        (DEEPSEEK, CallHistory(argument_text=True, null_content=True)),
        ("{{ messages[0].content }}", AS_OBJECTS),
        (THINKS, CallHistory(thinking=True)),
        (THINKS_OR_SAYS, CallHistory(thinking=True, one_text=True)),
    ],
)
def test_how_a_template_wants_earlier_calls(source: str, history: CallHistory) -> None:
    assert call_history(ChatTemplate({"default": source}, {}, "test")) == history


def a_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("content", ["", "I look."])
def test_calls_become_turns_and_results_observations(content: str) -> None:
    calls = [a_call("f", '{"a": 1}'), a_call("g", "{}")]
    turns = turns_of({"role": "assistant", "content": content, "tool_calls": calls})
    assert turns[: len(turns) - 2] == ([{"role": "assistant", "content": content}] if content else [])
    assert turns[-2:] == [
        {"role": "assistant", "metadata": "f", "content": '{"a": 1}'},
        {"role": "assistant", "metadata": "g", "content": "{}"},
    ]
    assert turns_of({"role": "tool", "content": "so"}) == [{"role": "observation", "content": "so"}]
    for message in ({"role": "user", "content": ""}, {"role": "assistant", "content": ""}):
        assert turns_of(message) == [message]


def test_tools_stand_in_the_message_of_the_system() -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    assert with_tools([user], [{"a": 1}]) == [{"role": "system", "content": "", "tools": [{"a": 1}]}, user]
    assert with_tools([system, user], [{"a": 1}]) == [{**system, "tools": [{"a": 1}]}, user]
    assert "tools" not in system
    (first, _) = with_tools([user], [{"a": "ä"}], as_text=True)
    assert first["tools"] == '[{"a": "ä"}]'
