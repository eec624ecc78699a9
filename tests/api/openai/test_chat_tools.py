"""Tools and reasoning over HTTP, through the `openai` package, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_server import Running, make_state, serve, stream
from calling_server import CALLS, LongEngine
from fake_engine import EOS
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from stoker_runtime.api.openai.answer import plan_reading
from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.api.tools.tools import ToolUse
from stoker_runtime.text.detokenizer import Detokenizer
from stoker_runtime.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer, TokenizerFiles

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %};{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }};{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tools_running() -> Iterator[Running]:
    engine = LongEngine()
    yield from serve(make_state(engine, TEMPLATE), engine)


@pytest.fixture
def tools_server(tools_running: Running) -> Running:
    tools_running.engine.reset()
    says(tools_running, CALLS)
    return tools_running


@pytest.fixture
def client(tools_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture
def raw(tools_server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tools_server.url, timeout=10) as found:
        yield found


def says(server: Running, text: str) -> None:
    server.engine.script = lambda _: [*text.encode(), EOS]


def prompt(server: Running) -> str:
    return bytes(server.engine.requests[-1].prompt_token_ids).decode()


def test_whole_answer(tools_server: Running, client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="byte-model", messages=MESSAGES, tools=TOOLS).choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "Sure.\n"
    assert message.model_extra == {"reasoning": "Shall I?", "reasoning_content": "Shall I?"}
    assert message.tool_calls is not None
    found = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert found == [("function", "weather", '{"city": "Zürich 🙂"}'), ("function", "now", "{}")]
    assert prompt(tools_server).startswith("tools: weather now;[user]hi")


@pytest.mark.parametrize("group", [1, 3, 64, 1000])
def test_streamed_answer_equals_the_whole(tools_server: Running, client: openai.OpenAI, group: int) -> None:
    tools_server.engine.group = group
    whole = client.chat.completions.create(model="byte-model", messages=MESSAGES, tools=TOOLS, n=2).choices
    with client.chat.completions.stream(model="byte-model", messages=MESSAGES, tools=TOOLS, n=2) as events:
        events.until_done()
        streamed = events.get_final_completion().choices
    for one, other in zip(whole, streamed, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content == other.message.content
        assert one.message.tool_calls is not None
        assert other.message.tool_calls is not None
        assert [(c.function.name, c.function.arguments) for c in one.message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in other.message.tool_calls
        ]
        assert (other.message.model_extra or {})["reasoning"] == "Shall I?"


def test_streamed_deltas(raw: httpx.Client) -> None:
    events = stream(raw, PATH, messages=MESSAGES, tools=TOOLS)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    heads = [call for call in calls if "id" in call]
    assert [(head["index"], head["type"], head["function"]["name"]) for head in heads] == [
        (0, "function", "weather"),
        (1, "function", "now"),
    ]
    rest = [call for call in calls if "id" not in call]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == '{"city": "Zürich 🙂"}'
    reasoning = [choice["delta"]["reasoning"] for choice in choices if "reasoning" in choice["delta"]]
    assert "".join(reasoning) == "Shall I?"
    assert all(c["delta"].get("reasoning") == c["delta"].get("reasoning_content") for c in choices)
    assert not any(choice["delta"] == {} and choice["finish_reason"] is None for choice in choices)


def test_logprobs_of_held_text_are_sent(raw: httpx.Client) -> None:
    events = stream(raw, PATH, messages=MESSAGES, tools=TOOLS, logprobs=True)
    found = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert len(found) == len(CALLS.encode()) + 1


def test_one_call_where_parallel_calls_are_off(raw: httpx.Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    choice = raw.post(PATH, json=body).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    calls = [c for event in stream(raw, PATH, **body) for c in event["choices"][0]["delta"].get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}


def test_tool_choice_none_hides_the_tools_and_reads_no_calls(tools_server: Running, raw: httpx.Client) -> None:
    choice = raw.post(PATH, json={"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}).json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert "<tool_call>" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert prompt(tools_server) == "[user]hi[assistant]"


def test_an_answer_cut_short_says_length(raw: httpx.Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": CALLS.index("rich")}
    choice = raw.post(PATH, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "Z')
    assert stream(raw, PATH, **body)[-1]["choices"][0]["finish_reason"] == "length"


def test_content_is_null_only_beside_calls_or_reasoning(tools_server: Running, raw: httpx.Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    for text, content in [
        ('<tool_call>{"name": "now"}</tool_call>', None),
        ("<think>hm", None),
        ("", ""),
        ("Hi", "Hi"),
    ]:
        says(tools_server, text)
        assert raw.post(PATH, json=body).json()["choices"][0]["message"]["content"] == content


def test_a_prompt_that_opened_the_reasoning(tools_server: Running, raw: httpx.Client) -> None:
    says(tools_server, "hm</think>Hi")
    body = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": True}}
    message = raw.post(PATH, json=body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi")
    message = raw.post(PATH, json={**body, "include_reasoning": False}).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi", "refusal": None}


def test_reasoning_effort_reaches_a_template_that_knows_it(tools_server: Running, raw: httpx.Client) -> None:
    assert raw.post(PATH, json={"messages": MESSAGES, "reasoning_effort": "low"}).status_code == 200
    assert "effort low" in prompt(tools_server)


def test_a_conversation_with_calls_goes_back_in(tools_server: Running, client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="byte-model", messages=MESSAGES, tools=TOOLS).choices[0].message
    assert message.tool_calls is not None
    history = [
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny"},
    ]
    client.chat.completions.create(model="byte-model", messages=history, tools=TOOLS)
    assert prompt(tools_server) == (
        "tools: weather now;[user]hi[assistant]<think>Shall I?</think>Sure.\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🙂"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>[tool]Sunny[assistant]'
    )


def test_beside_a_response_format_the_model_may_still_call(tools_server: Running, client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_object"}
    asked: Any = {"model": "byte-model", "messages": MESSAGES, "tools": TOOLS, "response_format": shape}
    called = client.chat.completions.create(**asked).choices[0]
    assert called.finish_reason == "tool_calls"
    constraint = tools_server.engine.requests[-1].params.constraint
    assert constraint is not None
    assert "<tool_call>" in constraint.lead
    says(tools_server, '{"a": 1}')
    spoken = client.chat.completions.create(**asked).choices[0]
    assert (spoken.message.content, spoken.finish_reason) == ('{"a": 1}', "stop")
    client.chat.completions.create(**asked, tool_choice="none")
    constraint = tools_server.engine.requests[-1].params.constraint
    assert constraint is not None
    assert "<tool_call>" not in constraint.lead


def test_tokenize_shows_the_tools(raw: httpx.Client) -> None:
    ids = raw.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()["tokens"]
    assert bytes(ids).decode().startswith("tools: weather now")


@pytest.mark.parametrize(
    ("fields", "param", "says_"),
    [
        ({"tools": []}, "tools", "at least one tool"),
        ({"tool_choice": "auto"}, "tool_choice", "only allowed when tools is set"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not one of"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "exclude each other"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        ({"tools": [{"type": "search"}]}, "tools[0].type", "must be 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]},
            None,
            "did you mean parameters?",
        ),
    ],
)
def test_bad_requests(raw: httpx.Client, fields: dict[str, Any], param: str | None, says_: str) -> None:
    response = raw.post(PATH, json={"messages": MESSAGES, **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert says_ in error["message"]
    assert param in (None, error["param"])


def test_a_server_without_a_parser_refuses_tools(http: httpx.Client) -> None:
    response = http.post(PATH, json={"messages": MESSAGES, "tools": TOOLS})
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]


def test_markers_that_are_special_tokens_stay_visible_to_the_parser() -> None:
    rust = RustTokenizer(models.BPE(dict(BYTE_OF_CHARACTER), []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(rust, TokenizerFiles(), "test")
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}</s>'
    use = ToolUse("auto", tools=(), schemas={"f": {}})
    reading = plan_reading(Dialect("mistral", "", True), use, "", None, True)
    decoder = Detokenizer(tokenizer, visible=reading.visible(tokenizer))
    shown = decoder.push(tokenizer.encode(text)) + decoder.finish()
    assert shown == text.removesuffix("</s>")
    assert reading.calls is not None
    call = reading.calls().parse(shown).tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert Detokenizer(tokenizer).push(tokenizer.encode(text)) == 'f[ARGS]{"a": 1}'
