"""Anthropic's Messages API through the `anthropic` package, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from api_server import KEY, Running, make_state, serve, wait_until
from calling_server import TEMPLATE, LongEngine, prompt, says
from pydantic import BaseModel

from stoker_runtime.api.messages.events import MessageBuilder

MODEL = "byte-model"
USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Ask.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object"}},
]


@pytest.fixture
def client(calling: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=calling.url, api_key="unused", max_retries=0) as found:
        yield found


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    """One message, with defaults for what must be there."""
    found = client.messages.create(**{"model": MODEL, "max_tokens": 400, "messages": USER, **fields})
    assert isinstance(found, Message)
    return found


def test_text_in_text_out(calling: Running, client: anthropic.Anthropic) -> None:
    says(calling, "Hello there.")
    message = ask(client, system="be kind", extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7})
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "Hello there."  # type: ignore[union-attr]
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    assert prompt(calling) == "[system]be kind[user]hi[assistant]"
    params = calling.engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (400, 0.25, 0.5, 7)
    usage = message.usage
    assert usage.cache_read_input_tokens == 2
    assert usage.input_tokens + 2 == len(prompt(calling))
    assert usage.output_tokens == len("Hello there.") + 1


def test_reasons_to_stop(calling: Running, client: anthropic.Anthropic) -> None:
    says(calling, "Hello there.")
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["th"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "th")
    assert stopped.content[0].text == "Hello "  # type: ignore[union-attr]


def without_ids(message: Message) -> dict[str, Any]:
    """A message without what differs from one to the next."""
    found = message.to_dict()
    del found["id"]
    for block in found["content"]:  # type: ignore[attr-defined]
        block.pop("id", None)
    return found


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_streamed_message_equals_the_whole(calling: Running, client: anthropic.Anthropic, group: int) -> None:
    calling.engine.group = group
    whole = ask(client, tools=TOOLS)
    with client.messages.stream(model=MODEL, max_tokens=400, messages=USER, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    thinking, text, weather, now = whole.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Shall I?"
    assert text.type == "text"
    assert text.text == "Sure.\n"
    assert weather.type == now.type == "tool_use"
    assert (weather.name, weather.input, now.name, now.input) == ("weather", {"city": "Zürich 🙂"}, "now", {})
    assert whole.stop_reason == "tool_use"


def test_events_come_in_order(calling: Running, client: anthropic.Anthropic) -> None:
    calling.engine.group = 1000
    events = list(client.messages.create(model=MODEL, max_tokens=400, messages=USER, tools=TOOLS, stream=True))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.type for event in events] == ["message_start", *block * 4, "message_delta", "message_stop"]
    first, last = events[0], events[-2]
    assert first.type == "message_start"
    assert first.message.usage.input_tokens > 0
    assert first.message.content == []
    assert last.type == "message_delta"
    assert last.delta.stop_reason == "tool_use"
    assert last.usage.output_tokens > 0


def test_events_have_their_names_and_a_ping(calling: Running) -> None:
    body = {"model": MODEL, "max_tokens": 3, "messages": USER, "stream": True}
    response = httpx.post(f"{calling.url}/v1/messages", json=body)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert "[DONE]" not in response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_async_client(calling: Running) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=calling.url, api_key="unused", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=400, messages=USER) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
    assert text.startswith("Sure.\n<tool_call>")


def test_loop_with_tools(calling: Running, client: anthropic.Anthropic) -> None:
    first = ask(client, messages=[{"role": "user", "content": "weather?"}], tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    results[1] = {**results[1], "content": "no clock", "is_error": True}
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "well?"}]},
    ]
    says(calling, "It is sunny.")
    assert ask(client, messages=history, tools=TOOLS).content[0].text == "It is sunny."  # type: ignore[union-attr]
    assert prompt(calling) == (
        "tools: weather now;[user]weather?[assistant]<think>Shall I?</think>Sure.\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🙂"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>[tool]sunny[tool]Error: no clock[user]well?[assistant]'
    )


def test_no_parallel_calls(client: anthropic.Anthropic) -> None:
    message = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_calls(calling: Running, client: anthropic.Anthropic, choice: Any) -> None:
    arguments = '{"city": "Paris"}'
    says(calling, arguments if choice["type"] == "tool" else f'[{{"name": "weather", "parameters": {arguments}}}]')
    whole = ask(client, tools=TOOLS, tool_choice=choice)
    with client.messages.stream(model=MODEL, max_tokens=400, messages=USER, tools=TOOLS, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert (call.name, call.input, whole.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    assert calling.engine.requests[-1].params.constraint is not None


def test_calls_that_are_cut_short_keep_what_came(calling: Running, client: anthropic.Anthropic) -> None:
    message = ask(client, tools=TOOLS, max_tokens=len("<think>\nShall I?\n</think>\n\nSure.\n<tool_call>\n") + 62)
    assert message.stop_reason == "max_tokens"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert isinstance(call.input, dict)
    assert str(call.input.get("city", "")).startswith("Z")


def test_thinking_is_switched_by_the_template(calling: Running, client: anthropic.Anthropic) -> None:
    says(calling, "Yes.")
    message = ask(client, thinking={"type": "disabled"})
    assert prompt(calling).endswith("[assistant]<think></think>")
    assert [block.type for block in message.content] == ["text"]
    ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt(calling).endswith("[assistant]")


def test_last_turn_of_the_assistant_is_continued(calling: Running, client: anthropic.Anthropic) -> None:
    says(calling, " Paris.")
    message = ask(client, messages=[*USER, {"role": "assistant", "content": "The answer is"}])
    assert prompt(calling) == "[user]hi[assistant]The answer is"
    assert message.content[0].text == " Paris."  # type: ignore[union-attr]


def test_system_turns_stand_where_they_are(calling: Running, client: anthropic.Anthropic) -> None:
    ask(client, messages=[*USER, {"role": "system", "content": "be brief"}])
    assert prompt(calling) == "[user]hi[system]be brief[assistant]"


class City(BaseModel):
    name: str


def test_parse(calling: Running, client: anthropic.Anthropic) -> None:
    says(calling, '{"name": "Paris"}')
    found = client.messages.parse(model=MODEL, max_tokens=400, messages=USER, output_format=City)
    assert found.parsed_output == City(name="Paris")
    assert calling.engine.requests[-1].params.constraint is not None


def test_count_tokens(calling: Running, client: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "system": "be kind", "tools": TOOLS}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = ask(client, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    fields["tool_choice"] = {"type": "none"}
    assert client.messages.count_tokens(**fields).input_tokens < counted


def test_a_client_that_goes_away_frees_the_engine(calling: Running, client: anthropic.Anthropic) -> None:
    calling.engine.delay = 0.01
    stream = client.messages.create(model=MODEL, max_tokens=400, messages=USER, stream=True)
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: len(calling.engine.aborted) == 1)


def test_errors_have_anthropics_shape(calling: Running, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model `other` does not exist."},
    }
    assert missing.value.request_id
    calling.engine.full = True
    with pytest.raises(anthropic.RateLimitError):
        ask(client)
    calling.engine.full = False
    calling.engine.fail_after, calling.engine.delay = 20, 0.001
    with pytest.raises(anthropic.InternalServerError, match="The step failed"):
        ask(client)
    with pytest.raises(anthropic.APIStatusError, match="The step failed"):
        list(client.messages.create(model=MODEL, max_tokens=400, messages=USER, stream=True))
    wrong = httpx.get(f"{calling.url}/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a string"),
        ({"messages": []}, "messages must have at least 1 item"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": 3, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}}, "'nothing'"),
        ({"tool_choice": {"type": "any"}}, "only allowed when tools is set"),
        ({"temperature": -1}, "temperature must be"),
        ({"max_tokens": 10**6}, "maximum context length"),
        ({"stop_sequences": [""]}, "stop_sequences must not hold an empty string"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"system": [IMAGE]}, "system[0].type is 'image'"),
        ({"speeed": "fast"}, "Unknown field speeed; did you mean speed?"),
    ],
)
def test_errors_name_the_clients_field(client: anthropic.Anthropic, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=400, messages=USER, extra_body=fields)
    assert words in caught.value.message


def test_api_key_as_anthropic_sends_it() -> None:
    engine = LongEngine()
    for running in serve(make_state(engine, TEMPLATE, api_keys=(KEY,)), engine):
        with anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0) as client:
            assert ask(client, max_tokens=2).stop_reason == "max_tokens"
        with (
            anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            ask(client)
        assert caught.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": "The API key is missing or wrong."},
        }


def test_a_message_that_the_server_cut_short_is_not_said_to_be_whole() -> None:
    builder = MessageBuilder("msg_1", "m")
    builder.finish({"finish_reason": "abort"}, {"prompt_tokens": 3, "completion_tokens": 1})
    assert builder.message["stop_reason"] == "max_tokens"
