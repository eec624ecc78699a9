"""Bodies of many small values: whatever their kind and size, they are answered soon and nobody else waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_server import Running
from waiting import judged

USER = [{"role": "user", "content": "hi"}]
RANDOM = random.Random()


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": RANDOM.choice(("user", "assistant")), "content": RANDOM.choice("abc")} for _ in range(count)]


def ids(count: int) -> list[int]:
    return [RANDOM.randrange(250) for _ in range(count)]


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"tool_{at}", "parameters": {}}} for at in range(count)]


KINDS: dict[str, tuple[str, int, Callable[[int], dict[str, Any]]]] = {
    "messages": ("/v1/chat/completions", 900_000, lambda n: {"messages": messages(n)}),
    "parts": (
        "/v1/chat/completions",
        400_000,
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]},
    ),
    "no messages": ("/v1/chat/completions", 2_000_000, lambda n: {"messages": [1] * n}),
    "unknown fields": ("/v1/chat/completions", 300_000, lambda n: {"messages": USER, **{f"k{i}": 1 for i in range(n)}}),
    "tools": ("/v1/chat/completions", 60_000, lambda n: {"messages": USER, "tools": tools(n)}),
    "variables": (
        "/v1/chat/completions",
        900_000,
        lambda n: {"messages": USER, "chat_template_kwargs": {"x": [{"a": 1}] * n}},
    ),
    "anthropic": ("/v1/messages", 200_000, lambda n: {"messages": messages(n), "max_tokens": 3}),
    "blocks": (
        "/v1/messages",
        200_000,
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}], "max_tokens": 3},
    ),
    "items": ("/v1/responses", 90_000, lambda n: {"input": messages(n)}),
    "ids": ("/detokenize", 8_000_000, lambda n: {"tokens": ids(n)}),
    "prompt ids": ("/v1/completions", 8_000_000, lambda n: {"prompt": ids(n), "max_tokens": 3}),
    "prompts of ids": ("/v1/completions", 90_000, lambda n: {"prompt": [ids(90)] * (n // 90), "max_tokens": 1}),
    "stop ids": ("/v1/completions", 900_000, lambda n: {"prompt": "hi", "stop_token_ids": ids(n)}),
    "biases": ("/v1/completions", 90_000, lambda n: {"prompt": "hi", "logit_bias": dict.fromkeys(map(str, ids(n)), 1)}),
    "choices": ("/v1/completions", 300_000, lambda n: {"prompt": "hi", "guided_choice": [f"c{at}" for at in range(n)]}),
    "schema": (
        "/v1/completions",
        200_000,
        lambda n: {"prompt": "hi", "guided_json": {"enum": [f"c{at}" for at in range(n)]}},
    ),
    "documents": ("/rerank", 300_000, lambda n: {"query": "a", "documents": ["b"] * n}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_values_keep_nobody_waiting(server: Running, kind: str) -> None:
    path, most, body = KINDS[kind]
    answer = judged(server, path, body(RANDOM.randint(most // 2, most)), {200, 400, 404, 501})
    if answer.status_code == 400:
        assert "error" in answer.text
        assert len(answer.content) < 2000


@pytest.mark.parametrize("kind", KINDS)
def test_values_below_the_limits_keep_nobody_waiting(server: Running, kind: str) -> None:
    path, most, body = KINDS[kind]
    judged(server, path, body(RANDOM.randint(min(most, 3000) // 2, min(most, 3000))), {200, 400, 404, 501})


def test_what_is_many_is_refused_by_name(http: httpx.Client) -> None:
    for path, body, says in (
        ("/v1/chat/completions", {"messages": messages(4099)}, "messages must have at most 4096 items"),
        ("/v1/messages", {"messages": messages(4101), "max_tokens": 1}, "messages must have at most 4096 items"),
        ("/v1/responses", {"input": messages(4177)}, "input holds 4177 items; at most 4096 are allowed"),
        ("/v1/chat/completions", {"messages": USER, "tools": tools(1031)}, "tools must have at most 1024 items"),
        ("/v1/completions", {"prompt": "hi", "guided_choice": ["a"] * 5000}, "guided_choice must have at most 4096"),
        (
            "/v1/completions",
            {"prompt": "hi", "guided_json": {"enum": ["abcdefgh" * 9000] * 4}},
            "guided_json comes to 288",
        ),
        ("/v1/completions", {"prompt": [1] * 2_000_000}, "The body holds more than 1049600 numbers"),
        ("/v1/chat/completions", {"messages": USER, "x": ["a"] * 70_000}, "The body holds more than 65536 texts"),
        ("/v1/chat/completions", {"messages": USER, "x": [None] * 140_000}, "more than 131072 values outside"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", **{f"k{at}": 1 for at in range(4500)}}]},
            "messages[0] has 4501 members; an object has at most 4096",
        ),
        ("/tokenize", {"prompt": "a" * 900_000}, "prompt has more than 262144 tokens"),
    ):
        answer = http.post(path, json={"model": "byte-model", **body}, timeout=60)
        assert answer.status_code == 400, (path, answer.text[:300])
        error = answer.json()["error"]
        assert says in error["message"]


def test_large_bodies_that_are_allowed_are_answered(http: httpx.Client, server: Running) -> None:
    longest = server.engine.max_model_len
    prompts = [ids(RANDOM.randint(longest // 2, longest - 2)) for _ in range(40)]
    answer = http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, answer.text[:300]
    assert [list(request.prompt_token_ids) for request in server.engine.requests[-40:]] == prompts
    text = "é😀\n" * 2_000_000
    body = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 50, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body, timeout=60).status_code == 200
    numbers = ids(200_000)
    told = http.post("/detokenize", json={"tokens": numbers}, timeout=60).json()["prompt"]
    assert told == bytes(numbers).decode("utf-8", errors="replace")
