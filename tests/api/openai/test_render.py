"""What is rendered is what the engine is asked when the same body is sent to be answered."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from api_server import Running

from stoker_runtime.request import SamplingParams

SEED = random.SystemRandom().getrandbits(32)


def parameters_of(params: SamplingParams) -> dict[str, Any]:
    """What the rendered parameters of an engine's request have to say."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "seed": params.seed,
        "logprobs": params.logprobs,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
    }


def word(source: random.Random) -> str:
    return "".join(source.choices("abcdé 漢\n", k=source.randint(1, 20)))


def settings(source: random.Random) -> dict[str, Any]:
    return {
        "temperature": source.uniform(0.1, 2),
        "top_p": source.uniform(0.1, 1),
        "seed": source.getrandbits(30),
        "max_tokens": source.randint(1, 40),
        "repetition_penalty": source.uniform(1, 2),
        "stop_token_ids": [source.randint(100, 500)],
        "cache_salt": word(source),
    }


def test_a_conversation_is_rendered_as_it_would_run(server: Running, http: httpx.Client) -> None:
    source = random.Random(SEED)
    messages = [{"role": source.choice(["user", "assistant"]), "content": word(source)} for _ in range(3)]
    body = {"model": "alias", "messages": messages, **settings(source), "logprobs": True, "top_logprobs": 2}
    rendered = http.post("/v1/chat/completions/render", json=body, headers={"x-request-id": "mine"}).json()
    assert server.engine.requests == [], f"rendering ran something (seed {SEED})"
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    [asked] = server.engine.requests
    assert rendered["token_ids"] == list(asked.prompt_token_ids)
    assert rendered["request_id"] == "chatcmpl-mine"
    assert rendered["model"] == "alias"
    assert rendered["cache_salt"] == asked.cache_salt
    assert parameters_of(asked.params).items() <= rendered["sampling_params"].items()
    assert {name: rendered[name] for name in ("features", "kv_transfer_params", "stream_options")} == {
        "features": None,
        "kv_transfer_params": None,
        "stream_options": None,
    }


def test_each_prompt_is_rendered(server: Running, http: httpx.Client) -> None:
    source = random.Random(SEED)
    body = {"prompt": [word(source), word(source)], **settings(source), "n": 2, "stop": ["x"]}
    rendered = http.post("/v1/completions/render", json=body, headers={"x-request-id": "mine"}).json()
    assert http.post("/v1/completions", json=body).status_code == 200
    # Two choices of each prompt were asked for, the second with a seed of its own.
    asked = server.engine.requests[::2]
    assert [each["token_ids"] for each in rendered] == [list(each.prompt_token_ids) for each in asked]
    assert [each["request_id"] for each in rendered] == ["cmpl-mine-0", "cmpl-mine-1"]
    for each, request in zip(rendered, asked, strict=True):
        assert parameters_of(request.params).items() <= each["sampling_params"].items()
        assert (each["sampling_params"]["n"], each["sampling_params"]["stop"]) == (2, ["x"])


def test_a_constraint_is_rendered_and_no_tokens_stay_none(http: httpx.Client) -> None:
    [rendered] = http.post(
        "/v1/completions/render", json={"prompt": [5, 6], "max_tokens": 0, "guided_regex": "[ab]{3}"}
    ).json()
    assert rendered["token_ids"] == [5, 6]
    assert rendered["sampling_params"]["max_tokens"] == 0
    assert rendered["sampling_params"]["structured_outputs"] == {"regex": "[ab]{3}"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions/render", {"prompt": "hi", "temperature": 9}, "temperature"),
        ("/v1/completions/render", {"prompt": "x" * 300}, "prompt"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, None),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ],
)
def test_what_would_not_run_is_not_rendered(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param
    assert answer.json() == http.post(path.removesuffix("/render"), json=body).json()
