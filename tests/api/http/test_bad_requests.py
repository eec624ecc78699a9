"""What cannot be served: each is a clear 4xx that names the field, and the server goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_server import CLIENT, Running, make_state, serve
from fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BEAMS = {"prompt": "a", "use_beam_search": True}


def case(path: str, body: dict[str, Any], param: str | None, says: str, status: int = 400) -> Any:
    return pytest.param(path, body, param, says, status, id=f"{path.rsplit('/', 2)[-2]}-{says[:40]}")


def completion(field: str, value: Any, says: str, param: str | None = None) -> Any:
    return case(COMPLETIONS, {"prompt": "hi", field: value}, param or field, says)


def chat(field: str, value: Any, says: str, param: str | None = None) -> Any:
    return case(CHAT, {"messages": USER, field: value}, param or field, says)


CASES = [
    case(COMPLETIONS, {"prompt": "hi", "model": "other"}, "model", "The model `other` does not exist.", 404),
    case(CHAT, {"messages": USER, "model": "other"}, "model", "The model `other` does not exist.", 404),
    case(COMPLETIONS, {}, "prompt", "prompt is required"),
    case(CHAT, {}, "messages", "messages is required"),
    case(CHAT, {"messages": []}, "messages", "messages must have at least 1 item, not 0."),
    completion("prompt", "x" * 300, "maximum context length is 256 tokens"),
    completion("max_tokens", 300, "maximum context length is 256 tokens"),
    chat("max_tokens", 0, "greater than or equal to 1; got 0"),
    completion("max_tokens", -1, "greater than or equal to 0"),
    completion("max_tokens", 10**30, "maximum context length"),
    completion("temperature", -0.1, "temperature must be between 0 and 2; got -0.1."),
    completion("temperature", "0.5", 'temperature must be a valid number; got "0.5".'),
    completion("temperature", True, "temperature must be a valid number; got true."),
    completion("top_p", 0, "top_p must be greater than 0"),
    completion("top_k", -5, "top_k must be at least 1"),
    completion("top_k", 1.5, "must be a valid integer"),
    completion("typical_p", 0, "typical_p must be greater than 0"),
    completion("min_p", 2, "min_p must be between 0 and 1"),
    completion("repetition_penalty", 0, "repetition_penalty must be greater than 0"),
    completion("presence_penalty", 3, "presence_penalty must be between -2 and 2"),
    completion("min_tokens", 17, "min_tokens must be between 0 and max_tokens"),
    completion("n", 0, "greater than or equal to 1"),
    completion("n", 1000, "less than or equal to 128"),
    case(COMPLETIONS, {"prompt": "a", "best_of": 2, "n": 3}, "best_of", "best_of must be at least n, which is 3"),
    case(COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    completion("best_of", 1000, "less than or equal to 128"),
    completion("length_penalty", 2.0, "only allowed with use_beam_search"),
    case(COMPLETIONS, {**BEAMS, "stream": True}, "use_beam_search", "cannot be streamed"),
    case(COMPLETIONS, {**BEAMS, "n": 11}, "n", "n must be at most 10"),
    case(COMPLETIONS, {**BEAMS, "stop": "x"}, "use_beam_search", "stop is not supported"),
    case(COMPLETIONS, {**BEAMS, "guided_regex": "x"}, "use_beam_search", "structured output is not supported"),
    completion("seed", 2**70, "less than"),
    completion("stop", [""], "must not hold an empty string"),
    completion("stop", ["a"] * 17, "at most 16"),
    completion("stop", 5, "must be a string or a list of strings"),
    completion("stop_token_ids", [512], "token id 512; this model's ids are 0 to 511"),
    completion("logit_bias", {"x": 1}, "no token id"),
    completion("logit_bias", {str(at): 1 for at in range(301)}, "of at most 300 tokens"),
    completion("stop_token_ids", list(range(65)), "at most 64 ids"),
    completion("allowed_token_ids", [512], "token id 512; this model's ids are 0 to 511"),
    completion("allowed_token_ids", [], "allows no token at all"),
    completion("bad_words", [""], "at least 1 character", "bad_words[0]"),
    completion("bad_words", ["x" * 65], "of 1 to 64 token ids each"),
    completion("logit_bias", {"999": 1}, "token id 999"),
    completion("logit_bias", {"9": "much"}, "must be a number"),
    completion("logprobs", 21, "less than or equal to 20"),
    chat("top_logprobs", 2, "only allowed when logprobs is true"),
    case(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    completion("prompt", [], "not empty"),
    completion("prompt", "", "The prompt is empty."),
    completion("prompt", ["a", 1], "must be a string, a list of strings"),
    completion("prompt", [True], "must be a string, a list of strings"),
    completion("prompt", [1, 512], "token id 512"),
    completion("prompt", [-1], "token id -1"),
    completion("stream_options", {"include_usage": True}, "only allowed when stream is true"),
    case(
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usag": True}},
        "stream_options.include_usag",
        "did you mean include_usage?",
    ),
    case(COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "cannot be streamed"),
    completion("stream", "yes", "must be a valid boolean"),
    completion("temprature", 1, "Unknown field temprature; did you mean temperature?"),
    completion("zzz", 1, "Unknown field zzz."),
    completion("extra_body", {"top_k": 1}, "its fields belong beside the others"),
    chat("functions", [], "use tools"),
    chat("messages", [{"role": "user", "content": [{"text": "x"}]}], "is required", "messages[0].content[0].type"),
    chat("messages", [{"role": "robot", "content": "x"}], "messages[0].role must be", "messages[0].role"),
    chat("messages", [{"role": "user"}], "content is required for the role 'user'", "messages[0].content"),
    chat("messages", [{"role": "user", "content": 5}], "must be a string or a list of parts", "messages[0].content"),
    chat("messages", [{"role": "user", "contnt": "x"}], "did you mean content?", "messages[0].contnt"),
    chat(
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "reads text only",
        "messages[0].content[0].type",
    ),
    chat(
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "is not valid JSON",
        "messages[0].tool_calls[0].function.arguments",
    ),
    chat("chat_template_kwargs", {"messages": []}, "must not hold messages"),
    chat("chat_template", "{{ messages }}", "--trust-request-chat-template"),
    chat("truncate_prompt_tokens", -2, "greater than or equal to -1"),
    case(
        CHAT,
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude each other",
    ),
    completion("priority", 5, "--scheduling-policy priority"),
    case("/tokenize", {}, "prompt", "either prompt or messages"),
    case("/detokenize", {"tokens": [1, 9999]}, "tokens", "token id 9999"),
    case("/detokenize", {"tokens": "abc"}, "tokens", "must be a list of token ids"),
]

UNSUPPORTED = {
    COMPLETIONS: {
        "suffix": "end",
        "logits_processors": ["x"],
        "kv_transfer_params": {"a": 1},
        "ec_transfer_params": {"a": 1},
        "prompt_embeds": "AAAA",
        "logprob_token_ids": [1],
        "thinking_token_budget": 5,
        "repetition_detection": {"max_pattern_size": 3},
        "watermarking": True,
    },
    CHAT: {
        "functions": [],
        "modalities": ["audio"],
        "audio": {"voice": "x"},
        "web_search_options": {},
        "moderation": {},
        "thinking_token_budget": 5,
    },
}


@pytest.mark.parametrize(("path", "body", "param", "says", "status"), CASES)
def test_bad_request(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, says: str, status: int
) -> None:
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert says in error["message"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, field, value) for path, fields in UNSUPPORTED.items() for field, value in fields.items()],
)
def test_unsupported_field_is_named(http: httpx.Client, path: str, field: str, value: Any) -> None:
    base = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    response = http.post(path, json={**base, field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert field in error["message"]
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "must be a finite number"),
        (b'{"prompt": "a", "temperature": 1e999}', "must be a finite number"),
    ],
    ids=["empty", "truncated", "not-utf8", "lone-surrogate", "list", "null", "deep", "nan", "huge"],
)
def test_broken_body(http: httpx.Client, raw: bytes, says: str) -> None:
    response = http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert http.get("/ready").status_code == 200


def test_many_bad_requests_leave_nothing_in_the_engine(server: Running, http: httpx.Client) -> None:
    for _ in range(20):
        assert http.post(COMPLETIONS, json={"prompt": "x", "temperature": -1}).status_code == 400
    assert server.engine.requests == []
    assert not server.state.active


def test_chat_without_a_template_says_what_to_do() -> None:
    engine = FakeEngine()
    for running in serve(make_state(engine, template=None), engine):
        response = CLIENT.post(f"{running.url}{CHAT}", json={"messages": USER})
        assert response.status_code == 400
        assert "--chat-template" in response.json()["error"]["message"]
        assert CLIENT.post(f"{running.url}{COMPLETIONS}", json={"prompt": "hi"}).status_code == 200
