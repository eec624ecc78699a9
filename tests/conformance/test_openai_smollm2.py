"""The `openai` client, async, streamed and parsed, on a real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import openai
import pytest
import pytest_asyncio
from known_names import KEY
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "Name the capital of France."}]
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    """A schema that a small model can fill."""

    name: Literal["Paris", "Lyon", "Nice"]
    rank: int = Field(ge=1, le=3)


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as found:
        yield found


async def test_answers_side_by_side(client: openai.AsyncOpenAI) -> None:
    ask = client.chat.completions.create
    answers = await asyncio.gather(*(ask(model="smollm2", messages=ASK, temperature=0) for _ in range(3)))
    assert [answer.choices[0].message.content for answer in answers] == [ANSWER] * 3


async def test_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="smollm2", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (8, 32)


async def test_parse(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="smollm2", messages=ASK, temperature=0, response_format=City, max_tokens=60
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert 1 <= parsed.rank <= 3


async def test_stream_helper_with_parse(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="smollm2", messages=ASK, temperature=0, response_format=City, max_tokens=60
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed is not None


async def test_errors_are_typed(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as late:
        await client.completions.create(model="smollm2", prompt="x", max_tokens=900, extra_body={"timeout": 0.01})
    assert (late.value.status_code, late.value.code) == (408, "deadline_exceeded")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
