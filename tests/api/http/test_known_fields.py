"""Fields that clients of vLLM and OpenAI send: each is known, and those that ask for nothing different are taken."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_server import CLIENT, Running, make_state, serve, stream
from calling_server import prompt, says
from fake_engine import SPOKEN, FakeEngine

from stoker_runtime.api.openai.protocol import ChatBody, CompletionBody
from stoker_runtime.api.responses.body import ResponsesBody

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": USER, "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
# What vLLM documents for every generating route, and what it and OpenAI document for one.
BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
CHAT_ONLY = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text audio function_call functions metadata modalities moderation
    prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store
    verbosity web_search_options
"""
RESPONSES_ONLY = """
    background background_options include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream stream_options temperature text
    tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
    prompt_cache_key prompt_cache_options prompt_cache_retention request_id mm_processor_kwargs priority cache_salt
    enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty seed stop
    ignore_eos vllm_xargs access_programs context_management conversation image moderation safety_identifier
"""
TAKEN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "spaces_between_special_tokens": False,
        "vllm_xargs": {"a": 1},
        "guided_decoding_backend": "xgrammar",
        "thinking_token_budget": -1,
        "watermarking": False,
        "routed_experts_prompt_start": 0,
        "return_token_offsets": True,
        "user": "me",
        "cache_salt": "x" * 1000,
        "logit_bias": None,
        "stop": None,
        "n": None,
    },
    CHAT: {
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": {"b": 1}},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "safety_identifier": "me",
        "verbosity": "low",
        "reasoning_effort": "high",
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "mm_processor_kwargs": {"num_crops": 4},
        "media_io_kwargs": {"video": {"num_frames": 8}},
        "parallel_tool_calls": True,
        "logprobs": False,
        "top_logprobs": 0,
        "documents": [{"title": "a", "text": "b"}],
        "return_mm_kwargs": False,
        "stream_interval": 3,
        "include_reasoning": True,
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": "x",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
                "provider_specific_fields": {"a": None},
                "thinking_blocks": [],
                "reasoning_details": [],
                "images": [],
                "parsed": {"a": 1},
            },
            *USER,
        ],
    },
    RESPONSES: {
        "service_tier": "priority",
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "detailed"},
        "text": {"verbosity": "high"},
        "include": ["file_search_call.results", "reasoning.encrypted_content"],
        "truncation": "auto",
        "prompt_cache_retention": "24h",
        "image": {"detail": "low"},
        "safety_identifier": "me",
    },
}


def test_every_documented_field_is_known() -> None:
    assert set(BOTH.split()) <= set(CompletionBody.model_fields)
    assert {"suffix", "prompt", "prompt_embeds", "best_of"} <= set(CompletionBody.model_fields)
    assert {*BOTH.split(), *CHAT_ONLY.split()} <= set(ChatBody.model_fields)
    assert set(RESPONSES_ONLY.split()) <= set(ResponsesBody.model_fields)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, name, value) for path, fields in TAKEN.items() for name, value in fields.items()],
)
def test_taken(http: httpx.Client, path: str, field: str, value: Any) -> None:
    answer = http.post(path, json={**BASE[path], field: value})
    assert answer.status_code == 200, answer.text


def test_numbers_without_a_fraction_are_integers(server: Running, http: httpx.Client) -> None:
    raw = b'{"prompt": "hi", "max_tokens": 3.0, "seed": 1e5, "top_k": 2.0, "stop_token_ids": [7.0]}'
    assert http.post(COMPLETIONS, content=raw).json()["usage"]["completion_tokens"] == 3
    params = server.engine.requests[-1].params
    assert (params.seed, params.top_k, params.stop_token_ids) == (100_000, 2, (7,))
    assert http.post(COMPLETIONS, content=b'{"prompt": "hi", "max_tokens": 3.5}').status_code == 400


def test_parts_may_be_plain_texts(server: Running, http: httpx.Client) -> None:
    content = ["a", {"type": "text", "text": "b"}]
    assert (
        http.post(CHAT, json={"messages": [{"role": "user", "content": content}], "max_tokens": 1}).status_code == 200
    )
    assert bytes(server.engine.requests[-1].prompt_token_ids).decode() == "[user]a\nb\n[assistant]"


def test_truncation_from_either_side(server: Running, http: httpx.Client) -> None:
    for side, kept in (("left", "def"), ("right", "abc"), (None, "def")):
        body = {"prompt": "abcdef", "max_tokens": 1, "truncate_prompt_tokens": 3, "truncation_side": side}
        assert http.post(COMPLETIONS, json=body).status_code == 200
        assert bytes(server.engine.requests[-1].prompt_token_ids).decode() == kept


def test_responses_are_cut_where_that_is_asked(server: Running, http: httpx.Client) -> None:
    body = {"input": "x" * 400, "max_output_tokens": 4}
    assert http.post(RESPONSES, json=body).status_code == 400
    answer = http.post(RESPONSES, json={**body, "truncation": "auto"}).json()
    assert (answer["truncation"], answer["usage"]["input_tokens"]) == ("auto", 252)


def test_prompt_text(http: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 2, "return_prompt_text": True}
    assert http.post(CHAT, json=body).json()["prompt_text"] == "[user]hi\n[assistant]"
    first, *rest = stream(http, CHAT, **body)
    assert first["prompt_text"] == "[user]hi\n[assistant]"
    assert not any("prompt_text" in event for event in rest)


def test_echo_repeats_the_assistants_last_message(http: httpx.Client) -> None:
    begun = [*USER, {"role": "assistant", "content": "Well, "}]
    body = {"max_tokens": 3, "echo": True, "add_generation_prompt": False, "continue_final_message": True, "n": 2}
    whole = http.post(CHAT, json={"messages": begun, **body}).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [f"Well, {SPOKEN[:3]}"] * 2
    events = stream(http, CHAT, messages=begun, **body)
    for index in (0, 1):
        mine = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in mine) == f"Well, {SPOKEN[:3]}"
    asked = http.post(CHAT, json={"messages": USER, "max_tokens": 3, "echo": True}).json()
    assert asked["choices"][0]["message"]["content"] == SPOKEN[:3]


@pytest.mark.parametrize("interval", [1, 2, 4, 100])
def test_events_hold_so_many_tokens(server: Running, http: httpx.Client, interval: int) -> None:
    server.engine.delay = 0.001
    events = stream(http, prompt="hi", max_tokens=10, n=2, stream_interval=interval, return_token_ids=True)
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == SPOKEN[:10]
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert sum(len(choice["token_ids"]) for choice in mine) == 10
        assert len(mine) <= 10 // interval + 3


def test_effort_reaches_the_template(calling: Running) -> None:
    says(calling, "x")
    for effort, given, expected in (
        ("low", None, "effort low;"),
        (None, {"reasoning_effort": "high"}, "effort high;"),
        (None, None, ""),
    ):
        body = {"messages": USER, "reasoning_effort": effort, "chat_template_kwargs": given}
        assert CLIENT.post(f"{calling.url}{CHAT}", json=body).status_code == 200
        assert prompt(calling).removeprefix("[user]hi").partition("[")[0] == expected


def test_templates_of_requests_where_they_are_trusted() -> None:
    engine = FakeEngine()
    for running in serve(make_state(engine, trust_request_chat_template=True), engine):
        template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ enable_thinking }}"
        body = {"messages": USER, "chat_template": template, "max_tokens": 1, "reasoning_effort": "none"}
        assert CLIENT.post(f"{running.url}{CHAT}", json=body).status_code == 200
        assert bytes(engine.requests[-1].prompt_token_ids).decode() == "<hi>False"
        given = {"chat_template_kwargs": {"enable_thinking": 3}}
        assert CLIENT.post(f"{running.url}{CHAT}", json={**body, **given}).status_code == 200
        assert bytes(engine.requests[-1].prompt_token_ids).decode() == "<hi>3"
        counted = CLIENT.post(f"{running.url}/tokenize", json={"messages": USER, "chat_template": "abc"}).json()
        assert counted["count"] == 3
        wrong = CLIENT.post(f"{running.url}{CHAT}", json={**body, "chat_template": "{% if %}"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "chat_template")
