"""POST /v1/chat/completions against the OpenAI and vLLM behaviour, streamed and whole."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_server import Running, stream
from fake_engine import SPOKEN, bytes_of

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"model": "byte-model", "messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_text(server: Running) -> str:
    return bytes(server.engine.requests[-1].prompt_token_ids).decode()


def test_shape_of_a_whole_answer(server: Running, http: httpx.Client) -> None:
    answer = chat(http, max_tokens=5)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SPOKEN[:5], "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["total_tokens"] == len("[user]hi\n[assistant]") + 5
    assert prompt_text(server) == "[user]hi\n[assistant]"


def test_length_is_what_the_context_leaves_and_the_newer_name_wins(http: httpx.Client) -> None:
    prompt = len("[user]hi\n[assistant]")
    assert chat(http)["usage"]["completion_tokens"] == 256 - prompt
    assert chat(http, max_tokens=9, max_completion_tokens=4)["usage"]["completion_tokens"] == 4


def test_usage_of_every_event_counts_what_was_said(server: Running, http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for group in (1, 3):
        server.engine.group = group
        events = stream(http, PATH, messages=USER, max_tokens=6, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [0, *range(group, 7, group), 6], "the role is no token"
        assert {event["usage"]["prompt_tokens"] for event in events} == {len("[user]hi\n[assistant]")}
    server.engine.group = 1
    several = stream(http, PATH, messages=USER, max_tokens=3, n=2, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in several]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


def test_stream_begins_with_the_role_and_finishes_once(http: httpx.Client) -> None:
    events = stream(http, PATH, messages=USER, max_tokens=4, n=2)
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == SPOKEN[:4]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_stream_usage(http: httpx.Client) -> None:
    events = stream(http, PATH, messages=USER, max_tokens=2, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events[:-1])


def test_content_as_parts(server: Running, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(http, messages=[{"role": "user", "content": parts}])
    assert prompt_text(server) == "[user]one\ntwo\n[assistant]"


def test_history_with_tools_and_reasoning_reaches_the_template(server: Running, http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    chat(http, messages=messages)
    assert prompt_text(server) == "[user]hi\n[assistant]\n[tool]42\n[assistant]"


def test_continue_final_message(server: Running, http: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer"}]
    chat(http, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt_text(server) == "[user]hi\n[assistant]The answer"


def test_logprobs(http: httpx.Client) -> None:
    found = chat(http, logprobs=True, top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert found == [
        {
            "token": "T",
            "logprob": -0.5,
            "bytes": [84],
            "top_logprobs": [
                {"token": "T", "logprob": -0.5, "bytes": [84]},
                {"token": "U", "logprob": -1.5, "bytes": [85]},
            ],
        }
    ]
    assert chat(http, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    events = stream(http, PATH, messages=USER, logprobs=True, max_tokens=3)
    tokens = [
        entry["token"] for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert tokens == ["T", "h", "e"]


def test_prompt_logprobs_and_token_ids(http: httpx.Client) -> None:
    answer = chat(http, prompt_logprobs=0, return_token_ids=True, max_tokens=2)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == 20
    assert answer["choices"][0]["token_ids"] == bytes_of("Th")


@pytest.mark.parametrize("choice", ["none", None])
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, choice: str | None) -> None:
    chat(
        http,
        max_tokens=1,
        tool_choice=choice,
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        modalities=["text"],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        logit_bias=None,
        stop=None,
    )
