"""`litellm` with its provider for vLLM's servers, `hosted_vllm/`."""

from __future__ import annotations

from typing import Any

import pytest
from known_names import KEY, client

litellm = client("litellm")

pytestmark = [
    pytest.mark.filterwarnings("ignore:::(litellm|pydantic|aiohttp)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ASK = [{"role": "user", "content": "Name the capital of France."}]
ANSWER = "The capital of France is Paris."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "enum": [3]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def real(url: str) -> dict[str, Any]:
    return {"model": "hosted_vllm/smollm2", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0, "timeout": 120}


def test_chat(real: dict[str, Any]) -> None:
    answer = litellm.completion(messages=ASK, max_tokens=16, **real)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(real: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=ASK, max_tokens=16, stream=True, **real))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


async def test_chat_async(real: dict[str, Any]) -> None:
    answer = await litellm.acompletion(messages=ASK, max_tokens=4, top_k=1, **real)
    assert answer.choices[0].message.content == "The capital of France"


def test_text(real: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="The capital of France is", max_tokens=1, **real)
    assert answer.choices[0].text == " Paris"


def test_forced_call(tiny_url: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    where = {"model": "hosted_vllm/tiny", "api_base": f"{tiny_url}/v1", "api_key": KEY, "timeout": 60}
    answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice=named, logit_bias=BIAS, **where)
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, call.arguments.replace(" ", "")) == ("weather", '{"days":3}')


BIAS = {"125": 100, **{str(ord(space)): -100 for space in " \n\r\t"}}
"""Closing is preferred: litellm takes `additionalProperties: false` out of the schema."""


def test_errors(real: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=ASK, **{**real, "api_key": "wrong", "max_retries": 0})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=ASK, top_p=7, **real)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(messages=ASK, **{**real, "model": "hosted_vllm/other", "max_retries": 0})
