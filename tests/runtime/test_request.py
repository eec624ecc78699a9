"""Choices of one request have one prompt, which is checked, packed and held once."""

from __future__ import annotations

import random
from array import array

import pytest

from stoker_runtime.engine.messages import Add, decode, encode
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Request, SamplingParams, packed, unpacked
from stoker_runtime.scheduler import limits
from stoker_runtime.scheduler.limits import refuse_impossible

VOCAB = 1000


def drawn() -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(random.randrange(1, 300)))


def wired(request: Request) -> Request:
    message = decode(encode(Add(1, request)))
    assert isinstance(message, Add)
    return message.request


def test_choices_hold_one_prompt() -> None:
    prompts = [drawn() for _ in range(20)]
    assert len(set(prompts)) > 15
    for prompt in prompts:
        choices = [Request(f"choice-{at}", prompt, SamplingParams(seed=at)) for at in range(random.randrange(1, 9))]
        found = [wired(each) for each in choices]
        assert found[0].prompt_token_ids == prompt
        assert len({id(each.prompt_token_ids) for each in found}) == 1
        assert packed(prompt) is packed(prompt)
        # Of another request with the same ids, too.
        assert packed((*prompt,)) == array("i", prompt).tobytes()
        assert unpacked(packed(prompt)) is found[0].prompt_token_ids


def test_a_prompt_is_looked_at_once_and_another_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    real = limits._check_ids

    def counted(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
        looked.extend([ids] if field == "prompt" else [])
        real(field, ids, vocab_size)

    monkeypatch.setattr(limits, "_check_ids", counted)
    good = drawn()
    for at in range(5):
        refuse_impossible(Request(f"choice-{at}", good, SamplingParams()), max_tokens=400, vocab_size=VOCAB)
    assert looked == [good]
    for bad in ((*good[1:], VOCAB), (*good[1:], -1), (*good[1:], True)):
        for _ in range(2):
            with pytest.raises(RequestError, match="prompt"):
                refuse_impossible(Request("bad", bad, SamplingParams()), max_tokens=400, vocab_size=VOCAB)
    if max(good):
        with pytest.raises(RequestError, match="outside"):
            refuse_impossible(Request("r", good, SamplingParams()), max_tokens=400, vocab_size=max(good))
