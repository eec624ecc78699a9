"""The `openai` package, unmodified, sync and async."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
from api_server import Running
from fake_engine import EOS, SPOKEN

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["byte-model", "alias"]
    assert client.models.retrieve("alias").owned_by == "stoker"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="byte-model", prompt=["a", "b"], max_tokens=4, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == [SPOKEN[:4]] * 4
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list(SPOKEN[:4])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="byte-model", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == SPOKEN[:4]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].bytes == [84]


def test_vllm_fields_through_extra_body(server: Running, client: openai.OpenAI) -> None:
    server.engine.script = lambda _: [104, EOS, 105]
    answer = client.chat.completions.create(
        model="byte-model", messages=MESSAGES, max_tokens=3, extra_body={"ignore_eos": True, "top_k": 5}
    )
    assert server.engine.requests[0].params.top_k == 5
    assert answer.choices[0].message.content == "h\x03i"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="byte-model", messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SPOKEN[:9]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_stream_helper(server: Running, client: openai.OpenAI) -> None:
    server.engine.script = lambda _: [*SPOKEN.encode(), EOS]
    with client.chat.completions.stream(model="byte-model", messages=MESSAGES, max_tokens=99) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == SPOKEN
    assert final.choices[0].finish_reason == "stop"


async def test_async_streams(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.completions.create(model="byte-model", prompt="a", max_tokens=9, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        answer = await client.chat.completions.create(model="byte-model", messages=MESSAGES, max_tokens=2)
    assert text == SPOKEN[:9]
    assert answer.choices[0].message.content == SPOKEN[:2]


def test_errors_have_the_clients_own_types(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
        client.completions.create(model="x", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="byte-model", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="byte-model", messages=[{"role": "user", "content": "x" * 999}])
    assert caught.value.code == "context_length_exceeded"
    server.engine.full = True
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="byte-model", prompt="a")


def test_retry_after_a_full_queue(server: Running) -> None:
    server.engine.full = True
    retrying = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=2)
    threading.Timer(0.5, lambda: setattr(server.engine, "full", False)).start()
    with retrying:
        assert retrying.completions.create(model="byte-model", prompt="a", max_tokens=2).choices[0].text == SPOKEN[:2]


def test_error_in_mid_stream_is_raised(server: Running, client: openai.OpenAI) -> None:
    server.engine.fail_after, server.engine.delay = 2, 0.01
    with pytest.raises(openai.APIError, match="The step failed"):
        list(client.completions.create(model="byte-model", prompt="a", stream=True))
