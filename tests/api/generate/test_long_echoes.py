"""Streams that repeat a long prompt, with its log-probabilities or ids: nobody waits while their events are made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import CLIENT, TEMPLATE, Running, make_state, serve
from fake_engine import FakeEngine, entry
from waiting import judged

from stoker_runtime.request import Request, TokenLogprobs, TokenOutput

RANDOM = random.Random()
LENGTH = RANDOM.randrange(40_000, 60_000)
TOP = 5
IDS = tuple(RANDOM.choices(range(32, 127), k=LENGTH))
TEXT = bytes(IDS).decode()


class LongEngine(FakeEngine):
    """It has the log-probabilities of the long prompt at hand: what makes them is an engine of its own process."""

    max_model_len = 100_000

    def __init__(self) -> None:
        super().__init__()
        known = [entry(token, TOP) for token in range(128)]
        self.known: tuple[TokenLogprobs, ...] = tuple(known[token] for token in IDS[1:])

    def _output(self, request: Request, tokens: tuple[int, ...], said: int) -> TokenOutput:
        if said or request.prompt_token_ids != IDS:
            return super()._output(request, tokens, said)
        whole = super()._output(Request(request.id, (1,), request.params), tokens, said)
        if request.params.prompt_logprobs is not None:
            whole.prompt_logprobs = self.known
        return whole


@pytest.fixture(scope="module")
def long() -> Iterator[Running]:
    engine = LongEngine()
    yield from serve(make_state(engine, TEMPLATE), engine)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "log-probabilities": ("/v1/completions", {"echo": True, "logprobs": TOP}),
    "of several choices": ("/v1/completions", {"echo": True, "logprobs": 1, "n": 3}),
    "ids": ("/v1/completions", {"return_token_ids": True, "n": 16}),
    "ids of a chat": ("/v1/chat/completions", {"return_token_ids": True, "return_prompt_text": True, "n": 16}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_nobody_waits_for_a_long_prompt_in_a_stream(long: Running, kind: str) -> None:
    path, asked = BODIES[kind]
    given = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    judged(long, path, {**given, **asked, "stream": True, "max_tokens": 3}, {200})


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stream_put_together_is_the_whole_answer(long: Running, choices: int) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": TOP, "n": choices, "max_tokens": 4, "return_token_ids": True}
    whole = CLIENT.post(f"{long.url}/v1/completions", json=body).json()["choices"]
    raw = CLIENT.post(f"{long.url}/v1/completions", json={**body, "stream": True}).text
    assert raw.endswith("data: [DONE]\n\n")
    events = [json.loads(each.removeprefix("data: ")) for each in raw.split("\n\n")[:-2]]
    for index in range(choices):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"] == TEXT + "The "
        for name, values in whole[index]["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert parts[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"] == list(IDS)
        assert [token for part in parts for token in part["token_ids"]] == whole[index]["token_ids"]


def test_a_chat_tells_of_its_prompt_once_a_choice(long: Running) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "n": 2, "max_tokens": 3, "stream": True}
    told = {"return_token_ids": True, "return_prompt_text": True}
    raw = CLIENT.post(f"{long.url}/v1/chat/completions", json={**body, **told}).text
    events = [json.loads(each.removeprefix("data: ")) for each in raw.split("\n\n")[:-2]]
    openings = [event for event in events if "prompt_text" in event]
    assert sorted(event["choices"][0]["index"] for event in openings) == [0, 1]
    for opening in openings:
        assert TEXT in opening["prompt_text"]
        assert bytes(opening["prompt_token_ids"]).decode() == opening["prompt_text"]
