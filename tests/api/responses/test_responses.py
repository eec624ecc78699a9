"""The Responses API through the `openai` package, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_server import Running, wait_until
from calling_server import prompt, says
from pydantic import BaseModel

from stoker_runtime.api.responses.events import ResponseBuilder

MODEL = "byte-model"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Ask.", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False},
]


@pytest.fixture
def client(calling: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_text_in_text_out(calling: Running, client: openai.OpenAI) -> None:
    says(calling, "Hello there.")
    response = client.responses.create(model=MODEL, input="hi", instructions="be kind", metadata={"a": "b"})
    assert response.output_text == "Hello there."
    assert (response.status, response.model, response.metadata) == ("completed", MODEL, {"a": "b"})
    assert [item.type for item in response.output] == ["message"]
    assert prompt(calling) == "[system]be kind[user]hi[assistant]"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 2


def test_sampling_reaches_the_engine(calling: Running, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="hi", max_output_tokens=5, temperature=0.25, top_p=0.5, extra_body={"top_k": 7, "seed": 3}
    )
    params = calling.engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (5, 0.25, 0.5, 7, 3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.25, 0.5, 5)


def without_ids(response: Any) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    found = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_streamed_response_equals_the_whole(calling: Running, client: openai.OpenAI, group: int) -> None:
    calling.engine.group = group
    whole = client.responses.create(model=MODEL, input="hi", tools=TOOLS)
    *_, last = client.responses.create(model=MODEL, input="hi", tools=TOOLS, stream=True)
    assert last.type == "response.completed"
    assert without_ids(last.response) == without_ids(whole)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, weather, now = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Shall I?"
    assert message.type == "message"
    assert weather.type == now.type == "function_call"
    assert json.loads(weather.arguments) == {"city": "Zürich 🙂"}
    assert (weather.name, now.name, now.arguments) == ("weather", "now", "{}")
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Shall I?")


def test_events_come_in_order(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.group = 1000
    events = list(client.responses.create(model=MODEL, input="hi", tools=TOOLS[:1], stream=True))
    calls = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]

    def text(kind: str) -> list[str]:
        return [
            "response.output_item.added",
            "response.content_part.added",
            f"response.{kind}.delta",
            f"response.{kind}.done",
            "response.content_part.done",
            "response.output_item.done",
        ]

    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *text("reasoning_text"),
        *text("output_text"),
        *calls,
        *calls,
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Sure.\n"


async def test_async_client(calling: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="unused", max_retries=0) as client:
        response = await client.responses.create(model=MODEL, input="hi")
        events = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
    assert response.status == "completed"
    assert events[-1].type == "response.completed"


class City(BaseModel):
    name: str
    inhabitants: int


def test_parse(calling: Running, client: openai.OpenAI) -> None:
    says(calling, '{"name": "Paris", "inhabitants": 2100000}')
    response = client.responses.parse(model=MODEL, input="hi", text_format=City)
    assert response.output_parsed == City(name="Paris", inhabitants=2100000)
    constraint = calling.engine.requests[-1].params.constraint
    assert constraint is not None
    assert "inhabitants" in constraint.text


def test_loop_with_tools(calling: Running, client: openai.OpenAI) -> None:
    """Call, answer the call, go on: with the items sent again, and with previous_response_id."""
    first = client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    says(calling, "It is sunny.")
    history: Any = [{"role": "user", "content": "weather?"}, *[item.to_dict() for item in first.output], *outputs]
    again = client.responses.create(model=MODEL, input=history, tools=TOOLS)
    sent_again = prompt(calling)
    linked = client.responses.create(model=MODEL, input=outputs, tools=TOOLS, previous_response_id=first.id)
    assert prompt(calling) == sent_again
    assert sent_again == (
        "tools: weather now;[user]weather?[assistant]<think>Shall I?</think>Sure.\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🙂"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>[tool]sunny[tool]sunny[assistant]'
    )
    assert again.output_text == linked.output_text == "It is sunny."


def test_store_retrieve_delete(calling: Running, client: openai.OpenAI) -> None:
    says(calling, "One.")
    first = client.responses.create(model=MODEL, input="a")
    second = client.responses.create(model=MODEL, input="b", previous_response_id=first.id, instructions="new")
    assert prompt(calling) == "[system]new[user]a[assistant]One.[user]b[assistant]"
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == ["b"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    unstored = client.responses.create(model=MODEL, input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_input_tokens_are_those_of_the_answer(client: openai.OpenAI, choice: Any) -> None:
    first = client.responses.create(model=MODEL, input="a")
    fields: Any = {
        "model": MODEL,
        "input": "b",
        "instructions": "be kind",
        "tools": TOOLS,
        "tool_choice": choice,
        "previous_response_id": first.id,
        "reasoning": {"effort": "low"},
    }
    counted = client.responses.input_tokens.count(**fields)
    usage = client.responses.create(**fields).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


def test_streamed_responses_are_stored(calling: Running, client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model=MODEL, input="a", stream=True)
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_a_client_that_goes_away_frees_the_engine(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.delay = 0.01
    stream = client.responses.create(model=MODEL, input="a", stream=True)
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: len(calling.engine.aborted) == 1)


def test_failure_in_mid_stream(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.fail_after, calling.engine.delay = 30, 0.001
    *_, last = client.responses.create(model=MODEL, input="a", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The step failed."
    calling.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="The step failed"):
        client.responses.create(model=MODEL, input="a", stream=True)


def test_logprobs(calling: Running, client: openai.OpenAI) -> None:
    says(calling, "ab")
    whole = client.responses.create(model=MODEL, input="a", top_logprobs=2, include=["message.output_text.logprobs"])
    *_, last = client.responses.create(model=MODEL, input="a", top_logprobs=2, stream=True)
    assert last.type == "response.completed"
    assert without_ids(last.response)["output"] == without_ids(whole)["output"]
    part = whole.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs][:2] == ["a", "b"]
    assert len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": 3}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n"),
        ({"truncation": "middle"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["everything"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_errors_name_the_clients_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="a", extra_body=fields)
    assert caught.value.param == param
    assert "messages[" not in caught.value.message


def test_reasoning_effort_reaches_the_template(calling: Running, client: openai.OpenAI) -> None:
    client.responses.create(model=MODEL, input="a", reasoning={"effort": "low"})
    assert "effort low;" in prompt(calling)


def test_allowed_tools_leave_the_others_out(calling: Running, client: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    client.responses.create(model=MODEL, input="a", tools=TOOLS, tool_choice=choice)
    assert prompt(calling).startswith("tools: now;")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls(calling: Running, client: openai.OpenAI, choice: Any) -> None:
    arguments = '{"city": "Paris"}'
    named = isinstance(choice, dict)
    says(calling, arguments if named else f'[{{"name": "weather", "parameters": {arguments}}}]')
    whole = client.responses.create(model=MODEL, input="a", tools=TOOLS, tool_choice=choice)
    *_, last = client.responses.create(model=MODEL, input="a", tools=TOOLS, tool_choice=choice, stream=True)
    assert last.type == "response.completed"
    for response in (whole, last.response):
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
        assert response.tool_choice is not None
    assert calling.engine.requests[-1].params.constraint is not None


def test_a_deadline(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.delay = 0.02
    *_, last = client.responses.create(model=MODEL, input="a", stream=True, extra_body={"timeout": 0.2})
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "deadline_exceeded"
    assert wait_until(lambda: len(calling.engine.aborted) == 1)


def test_a_response_that_the_server_cut_short_is_not_said_to_be_whole() -> None:
    builder = ResponseBuilder({"id": "resp_1", "output": [], "status": "in_progress"})
    builder.close("abort")
    ended = builder.finish("abort", {})
    assert (ended["type"], builder.response["status"]) == ("response.incomplete", "incomplete")
