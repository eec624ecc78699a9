"""`stoker serve` with a real model and the `openai` client: answers that are right, streamed and whole."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_server import CLIENT
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from server_process import ServerProcess
from tests import real_models

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    model = real_models.smollm2()
    program = [sys.executable, "-m", "stoker_cli", "serve", str(model)]
    # In 32 bits, so that what two ways of asking must agree on is not drowned in the rounding of bf16 logits.
    flags = ("--max-model-len", "512", "--device", "cpu", "--dtype", "float32")
    process = ServerProcess(program, "--served-model-name", "smollm2", *flags)
    try:
        yield process.wait_ready(120)
    finally:
        process.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as found:
        yield found


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 120,
}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
    ids=["required", "named"],
)
def test_forced_calls(client: openai.OpenAI, choice: Any, finish: str) -> None:
    whole = client.chat.completions.create(**ASK, tool_choice=choice, n=2, parallel_tool_calls=False)
    with client.chat.completions.stream(**ASK, tool_choice=choice, parallel_tool_calls=False) as events:
        events.until_done()
        streamed = events.get_final_completion().choices[0]
    for each in (*whole.choices, streamed):
        assert each.finish_reason == finish
        assert each.message.tool_calls is not None
        call = each.message.tool_calls[0]
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.function.name == "get_weather"
        found = json.loads(call.function.arguments)
        assert "Paris" in found["city"]
        assert found["unit"] in ("celsius", "fahrenheit")


def test_bad_words_and_allowed_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**asked, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in (answer.choices[0].message.content or "")
    free = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    allowed = (free.model_extra or {})["token_ids"]
    same = client.chat.completions.create(**asked, extra_body={"allowed_token_ids": allowed})
    assert same.choices[0].message.content == ANSWER
    fewer = [token for token in allowed if token != allowed[0]]
    other = client.chat.completions.create(
        **asked, extra_body={"allowed_token_ids": fewer, "return_token_ids": True, "ignore_eos": True}
    )
    assert set((other.choices[0].model_extra or {})["token_ids"]) <= set(fewer)


def test_beams_are_likelier_than_greedy(client: openai.OpenAI) -> None:
    def total(**more: Any) -> float:
        answer = client.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=4, logprobs=0, **more
        )
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        return sum(value for value in found.token_logprobs if value is not None)

    assert total(n=3, extra_body={"use_beam_search": True}) >= total(temperature=0) - 1e-3


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ANSWER, "stop")
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 32


def test_stop_string_seed_and_choices(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, stop=" is")
    assert stopped.choices[0].message.content == "The capital of France"
    drawn = [
        client.completions.create(model="smollm2", prompt="Once", seed=7, temperature=1.0, max_tokens=6, n=2)
        for _ in range(2)
    ]
    texts = [[choice.text for choice in answer.choices] for answer in drawn]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_logprobs_of_echoed_prompt_agree_with_those_of_generation(client: openai.OpenAI) -> None:
    """Score what was generated: the log-probabilities must be those of generating it."""
    prompt = [504, 3575, 282, 4649, 314]
    generated = client.completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=5, logprobs=3, extra_body={"return_token_ids": True}
    ).choices[0]
    assert generated.logprobs is not None
    ids = generated.model_extra["token_ids"]  # type: ignore[index]
    scored = client.completions.create(
        model="smollm2", prompt=prompt + ids, temperature=0, max_tokens=0, logprobs=3, echo=True
    ).choices[0]
    assert scored.logprobs is not None
    assert scored.logprobs.tokens is not None
    assert scored.logprobs.token_logprobs is not None
    assert generated.logprobs.token_logprobs is not None
    assert scored.logprobs.tokens[5:] == generated.logprobs.tokens
    pairs = zip(scored.logprobs.token_logprobs[5:], generated.logprobs.token_logprobs, strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs)


def test_greedy_tokens_are_the_likeliest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_bad_input_leaves_the_server_up(server: ServerProcess, client: openai.OpenAI) -> None:
    for fields in ({"temperature": -1}, {"max_tokens": 600}, {"stop_token_ids": [10**6]}, {"n": 10**6}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smollm2", prompt="x", extra_body=fields)
    assert CLIENT.get(f"{server.url}/ready").status_code == 200


def test_metrics_count_what_happened(server: ServerProcess, client: openai.OpenAI) -> None:
    client.completions.create(model="smollm2", prompt="x", max_tokens=3)
    metrics = CLIENT.get(f"{server.url}/metrics").text
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line[0] != "#"}
    label = '{model_name="smollm2"}'
    assert values[f"vllm:generation_tokens_total{label}"] >= 3
    assert values[f"vllm:prefix_cache_hits_total{label}"] >= 32
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] >= 1
    assert values[f"vllm:request_queue_time_seconds_count{label}"] >= 1
