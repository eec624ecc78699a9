"""Texts of megabytes: refused or cut soon, and nobody else waits meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_server import Running
from fastapi.routing import iter_route_contexts
from waiting import judged, longest_gap

from stoker_runtime.api.app import KEYED
from stoker_runtime.api.http.routing import body_of
from stoker_runtime.text.tokenizer import Tokenizer

LONG = "All work and no play makes a text long.\n" * 200_000
USER = [{"role": "user", "content": "hi"}]
FIELDS = sorted(
    (route.path, field.alias or name)
    for router in KEYED
    for route in iter_route_contexts(router.routes)
    if route.path is not None and route.endpoint is not None and (body := body_of(route.endpoint)) is not None
    for name, field in body.model_fields.items()
)
"""Every field of every body."""
FORMS: tuple[Callable[[str], Any], ...] = (
    lambda text: text,
    lambda text: [text],
    lambda text: {text: 1},
    lambda text: {"type": text},
    lambda text: [{"type": "function", "function": {"name": "f", "description": text, "parameters": {"enum": [text]}}}],
    lambda text: [{"role": "user", "content": text, "name": text}],
    lambda text: {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [text]}}},
    lambda text: {"grammar": text},
)
"""Where texts stand in values."""
DRAWN = 12
ANYTHING = {*range(200, 500), 501}


def test_encoding_lets_other_threads_go_on() -> None:
    tokenizer = Tokenizer.synthetic(300)
    text = LONG[:1_500_000]
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_plain(text),
        lambda: tokenizer.encode_texts(text, None),
        lambda: tokenizer.encode_texts(text[:700_000], text[700_000:]),
    ):
        took: list[float] = []

        def timed(encode: Callable[[], object] = encode, took: list[float] = took) -> None:
            began = time.perf_counter()
            encode()
            took.append(time.perf_counter() - began)

        assert longest_gap(timed, lambda: time.sleep(0.001)) < max(took[0] / 2, 0.1)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": LONG}, 400),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": 3}, 200),
        ("/v1/completions", {"prompt": ["short", LONG]}, 400),
        ("/v1/completions", {"prompt": ["word " * 600] * 2000}, 400),
        ("/v1/completions", {"prompt": "hi", "bad_words": [LONG]}, 400),
        ("/v1/completions", {"prompt": "hi", "bad_words": ["word " * 1500] * 1000}, 400),
        ("/v1/completions", {"prompt": "hi", "stop": [LONG[at:] for at in range(3)], "max_tokens": 50}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"x": LONG}, "max_tokens": 3}, 200),
        ("/v1/responses", {"input": LONG}, 400),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}, 400),
    ],
)
def test_nobody_else_waits(server: Running, path: str, body: dict[str, Any], status: int) -> None:
    judged(server, path, dict(body), {status})


def test_a_long_text_anywhere_keeps_nobody_waiting(server: Running) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    pick = random.Random(seed)
    # Requests that are answered ask for little.
    others = {"prompt": "hi", "messages": USER, "input": "hi", "max_tokens": 1}
    for path, field in pick.sample(FIELDS, DRAWN):
        known = {name for at, name in FIELDS if at == path}
        length = pick.randrange(len(LONG) // 2, len(LONG))
        body = {name: value for name, value in others.items() if name in known}
        judged(server, path, {**body, field: pick.choice(FORMS)(LONG[:length])}, ANYTHING)


def test_a_key_of_many_digits_is_no_token(http: httpx.Client) -> None:
    biases = {"7" * random.randrange(4400, 90_000): 1}
    answer = http.post("/v1/completions", json={"prompt": "hi", "logit_bias": biases})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
    assert len(answer.text) < 2000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_with_many_numbers_keep_nobody_waiting(server: Running, path: str) -> None:
    chat: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 20}
    body = chat if "chat" in path else {"prompt": "hi", "logprobs": 20}
    answer = judged(server, path, {**body, "n": random.randrange(20, 40), "max_tokens": 200}, {200})
    assert len(answer.content) > 500_000


def test_what_is_kept_of_a_long_prompt_is_its_end_or_its_beginning(server: Running, http: httpx.Client) -> None:
    text = "".join(f"<{at}>" for at in range(60_000))
    for side, expected in (("left", text[-77:]), ("right", text[:77])):
        body = {"prompt": text, "truncate_prompt_tokens": 77, "truncation_side": side, "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert bytes(server.engine.requests[-1].prompt_token_ids).decode() == expected


def test_a_prompt_of_a_little_too_many_tokens_is_counted(http: httpx.Client) -> None:
    said = http.post("/v1/completions", json={"prompt": "x" * 5000, "max_tokens": 7}).json()["error"]["message"]
    assert "However, you requested 5007 tokens (5000 in the prompt, 7 in the completion)" in said
