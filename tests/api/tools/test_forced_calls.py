"""Forced calls: the schema, what a model is told, and answers of an engine on random tokens through `openai`."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from constrained_server import constrained_client
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from stoker_runtime.api.tools.forced_calls import told, tool_choice_schema
from stoker_runtime.api.tools.tools import FunctionSpec, ToolSpec, ToolUse

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}},
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ROOM = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any] | None = None) -> ToolSpec:
    return ToolSpec(type="function", function=FunctionSpec(name=name, parameters=parameters, strict=True))


SPECS = (tool("weather", CITY), tool("a/b~c", TREE), tool("now"))
SCHEMAS = {each.function.name: each.function.parameters or {} for each in SPECS}
REQUIRED = ToolUse("required", "", SPECS, True, SCHEMAS)


def valid(use: ToolUse, value: Any) -> bool:
    schema = tool_choice_schema(use)
    assert schema is not None
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_schema_of_a_named_tool_is_its_parameters() -> None:
    assert tool_choice_schema(ToolUse("named", "weather", SPECS, True, SCHEMAS)) == CITY
    assert valid(ToolUse("named", "now", SPECS, True, SCHEMAS), {})
    assert not valid(ToolUse("named", "now", SPECS, True, SCHEMAS), {"a": 1})
    assert tool_choice_schema(ToolUse("named", "f", (), True, {"f": {"properties": {}}})) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    loose = {"type": "object", "properties": {"input": {"type": "integer"}}}
    assert not valid(ToolUse("named", "f", (), True, {"f": loose}), {"input": 3, "exclusiveMaximum": 1000})
    assert not valid(ToolUse("required", "", (), True, {"f": loose}), [{"name": "f", "parameters": {"sum": 7}}])
    said = ToolUse("named", "f", (), True, {"f": {**loose, "additionalProperties": True}})
    assert valid(said, {"input": 3, "exclusiveMaximum": 1000})
    assert tool_choice_schema(ToolUse("auto", "", SPECS, True, SCHEMAS)) is None


def test_schema_of_required_calls() -> None:
    use = REQUIRED
    weather = {"name": "weather", "parameters": {"city": "Rome", "days": 2}}
    tree = {"name": "a/b~c", "parameters": {"root": {"left": {"n": 1}}}}
    assert valid(use, [weather, tree, {"name": "now", "parameters": {}}])
    wrong = {"name": "a/b~c", "parameters": {"root": {"left": {"n": "one"}}}}
    for bad in ([], [wrong], [{"name": "weather", "parameters": {}}], [{"name": "x", "parameters": {}}], {}):
        assert not valid(use, bad)
    single = ToolUse("required", "", SPECS, False, SCHEMAS)
    assert valid(single, [weather])
    assert not valid(single, [weather, weather])


def test_tools_without_arguments_are_called_once_each() -> None:
    names = [f"tool_{at}" for at in range(random.randint(1, 9))]
    empty: list[dict[str, Any]] = [{}, {"type": "object", "properties": {}}, {"properties": {}, "title": "None"}]
    use = ToolUse("required", "", (), True, {name: random.choice(empty) for name in names})
    calls = [{"name": name, "parameters": {}} for name in names]
    assert valid(use, calls)
    assert valid(use, calls[:1])
    assert not valid(use, [*calls, calls[0]])
    # One that takes something may be called for each thing.
    loose: dict[str, Any] = random.choice([CITY, {"type": "object"}, {**empty[1], "additionalProperties": True}])
    more = ToolUse("required", "", (), True, {**use.schemas, "other": loose})
    assert valid(more, [*calls, *calls])


def test_a_template_without_tools_is_told_of_them_in_the_first_message() -> None:
    first, second = told([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], REQUIRED)
    assert first["role"] == "system"
    assert '"name": "weather"' in first["content"]
    assert first["content"].endswith("Be kind.")
    assert second == {"role": "user", "content": "Hi"}
    named = told([{"role": "user", "content": "Hi"}], ToolUse("named", "now", SPECS, True, SCHEMAS))
    assert "the arguments of now" in named[0]["content"]


MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": CITY}},
    {"type": "function", "function": {"name": "lamp", "parameters": ROOM}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SCHEMA_OF = {"weather": CITY, "lamp": ROOM, "now": {"type": "object", "maxProperties": 0}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with constrained_client() as found:
        yield found


def asked(choice: Any, **others: Any) -> dict[str, Any]:
    return {
        "model": "byte-model",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 1500,
        **others,
    }


def check_calls(message: Any) -> list[str]:
    """The names of the calls; every one is valid."""
    assert not message.content
    names = []
    for call in message.tool_calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA_OF[call.function.name])
        names.append(call.function.name)
    return names


@pytest.mark.asyncio(loop_scope="module")
class TestForcedCalls:
    """The `openai` package, unmodified."""

    async def test_named(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(**asked(NAMED, n=4, seed=1))
        for choice in answer.choices:
            assert check_calls(choice.message) == ["weather"]
            assert choice.finish_reason == "stop"
        assert len({str(choice.message.tool_calls) for choice in answer.choices}) == 4

    async def test_required(self, client: openai.AsyncOpenAI) -> None:
        numbers = []
        for seed in range(0, 40, 8):
            answer = await client.chat.completions.create(**asked("required", n=8, seed=seed))
            for choice in answer.choices:
                numbers.append(len(check_calls(choice.message)))
                assert choice.finish_reason == "tool_calls"
        assert max(numbers) > 1, "calls in parallel"

    async def test_one_call_where_parallel_calls_are_off(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(**asked("required", n=8, seed=3, parallel_tool_calls=False))
        assert all(len(check_calls(choice.message)) == 1 for choice in answer.choices)

    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
    async def test_streamed_equals_whole(self, client: openai.AsyncOpenAI, choice: Any) -> None:
        whole = await client.chat.completions.create(**asked(choice, n=3, seed=11))
        async with client.chat.completions.stream(**asked(choice, n=3, seed=11)) as events:
            await events.until_done()
            streamed = await events.get_final_completion()
        for one, other in zip(whole.choices, streamed.choices, strict=True):
            assert one.finish_reason == other.finish_reason == ("stop" if choice is NAMED else "tool_calls")
            assert check_calls(one.message) == check_calls(other.message)
            assert one.message.tool_calls is not None
            assert other.message.tool_calls is not None
            for call, again in zip(one.message.tool_calls, other.message.tool_calls, strict=True):
                assert isinstance(call, ChatCompletionMessageFunctionToolCall)
                assert isinstance(again, ChatCompletionMessageFunctionToolCall)
                assert call.function.arguments == again.function.arguments

    async def test_cut_short_is_length(self, client: openai.AsyncOpenAI) -> None:
        choice = (await client.chat.completions.create(**asked("required", max_tokens=5))).choices[0]
        assert choice.finish_reason == "length"

    async def test_a_response_format_beside_it_is_about_content(self, client: openai.AsyncOpenAI) -> None:
        choice = (
            await client.chat.completions.create(**asked(NAMED, response_format={"type": "json_object"}))
        ).choices[0]
        assert check_calls(choice.message) == ["weather"]
