"""Random bodies for the routes that translate: whatever comes, the answer is an answer or the client's error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_server import Running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_runtime.api.answering.loopback import read_events

WORDS = [
    "type",
    "role",
    "content",
    "text",
    "input_text",
    "output_text",
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "call_id",
    "name",
    "arguments",
    "output",
    "summary",
    "user",
    "assistant",
    "system",
    "tool",
    "tool_use",
    "tool_result",
    "thinking",
    "id",
    "tool_use_id",
    "input",
    "is_error",
    "function",
    "parameters",
    "strict",
    "allowed_tools",
    "mode",
    "tools",
    "auto",
    "any",
    "none",
    "required",
    "json_schema",
    "schema",
    "format",
    "weather",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=12,
)
TEXT = st.just("hi") | VALUES


def part(kinds: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.sampled_from(kinds)}, optional={"text": TEXT, "thinking": TEXT})


def entries(kinds: list[str], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Lists of things that look right in most places."""
    parts = st.lists(part(["text", "input_text", "thinking", "tool_result", "image"]), max_size=2)
    optional = {
        "type": st.sampled_from(kinds),
        "role": st.sampled_from(["user", "assistant", "system", "robot"]),
        "content": TEXT | parts,
        **fields,
    }
    return st.lists(st.fixed_dictionaries({}, optional=optional) | VALUES, max_size=3)


TOOLS = entries(["function", "custom"], name=st.just("weather") | VALUES, parameters=VALUES, input_schema=VALUES)
RESPONSES = st.fixed_dictionaries(
    {
        "max_output_tokens": st.just(2),
        "input": st.just("hi")
        | entries(
            ["message", "function_call", "function_call_output", "reasoning"],
            call_id=TEXT,
            name=TEXT,
            arguments=st.just("{}") | VALUES,
            output=TEXT,
            summary=VALUES,
        ),
    },
    optional={
        "tools": TOOLS,
        "tool_choice": VALUES | st.sampled_from(["auto", "none", "required"]),
        "text": VALUES | st.fixed_dictionaries({"format": VALUES}),
        "reasoning": VALUES,
        "instructions": TEXT,
        "include": VALUES,
        "metadata": VALUES,
        "previous_response_id": VALUES,
        "stream": st.booleans(),
        "background": VALUES,
        "store": VALUES,
    },
)
MESSAGES = st.fixed_dictionaries(
    {
        "model": st.just("byte-model"),
        "max_tokens": st.just(2),
        "messages": entries(["message"]),
    },
    optional={
        "system": TEXT,
        "tools": TOOLS,
        "tool_choice": VALUES | st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool"])}),
        "thinking": VALUES,
        "output_config": VALUES,
        "stop_sequences": VALUES,
        "metadata": VALUES,
        "stream": st.booleans(),
    },
)


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", MESSAGES.map(lambda body: {**body, "max_tokens": None})),
    ],
)
def test_any_body(calling: Running, path: str, bodies: st.SearchStrategy[dict[str, Any]]) -> None:
    with httpx.Client(base_url=calling.url, timeout=20) as http:

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies)
        def run(body: dict[str, Any]) -> None:
            if body.get("max_tokens", 0) is None:
                del body["max_tokens"]
            answer = http.post(path, content=json.dumps(body).encode())
            assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text, body)
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.rstrip().rpartition("event: ")[2].split("\n")[0] in (
                    "response.completed",
                    "response.incomplete",
                    "message_stop",
                )

        run()


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff", b'{"input": "\\ud800"}', b"[" * 100_000, b'{"input": 1e999}']
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_no_json(http: httpx.Client, path: str, raw: bytes) -> None:
    answer = http.post(path, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_events_are_read_back() -> None:
    body = b'data: {"a": 1}\n\ndata: {"b": "\\u2028 data: x"}\n\ndata: [DONE]\n\n'
    assert list(read_events(body)) == [{"a": 1}, {"b": "\u2028 data: x"}, None]
