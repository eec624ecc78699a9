"""Allowed tokens and bad words: the masks they make, and sequences under them, in company and alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.request import Constraint, ConstraintKind, FinishReason, Request, SamplingParams
from stoker_runtime.sampling import grammar
from stoker_runtime.sampling.token_rules import TokenRules

VOCAB, EOS = 260, 257
LETTERS = tuple(range(97, 123))


def legal(params: SamplingParams, output: list[int], vocab: int = 70) -> set[int]:
    words = np.full(-(-vocab // 32), -1, dtype=np.int32)
    TokenRules(params, vocab).apply(words, output)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
    return set(bits.nonzero()[0].tolist())


def test_masks() -> None:
    everything = set(range(70))
    assert legal(SamplingParams(allowed_token_ids=(0, 31, 32, 69)), []) == {0, 31, 32, 69}
    rules = SamplingParams(bad_words=((5,), (1, 2, 3), (2, 4), (63,)))
    assert legal(rules, []) == everything - {5, 63}
    assert legal(rules, [1]) == everything - {5, 63}
    assert legal(rules, [2]) == everything - {5, 63, 4}
    assert legal(rules, [1, 2]) == everything - {5, 63, 3, 4}
    assert legal(rules, [9, 9, 1, 2]) == everything - {5, 63, 3, 4}
    assert legal(SamplingParams(allowed_token_ids=(1, 2), bad_words=((2,),)), []) == {1}


def test_what_needs_a_mask() -> None:
    assert not SamplingParams(bad_words=((1,), (2,))).masked
    assert SamplingParams(bad_words=((1, 2),)).masked
    assert SamplingParams(bad_words=tuple((at,) for at in range(200))).masked
    assert SamplingParams(allowed_token_ids=(1,)).masked


def loop_over(**sizes: Any) -> StepLoop:
    sizes = {"vocab_size": VOCAB, "max_num_seqs": 4, "eos_token_ids": (EOS,), **sizes}
    return StepLoop(UniformExecutor(**sizes), EngineConfig(model="shape:tiny"))


def finish_all(loop: StepLoop) -> None:
    while loop.has_work:
        loop.step()
        loop.scheduler.check()


def output(sequence: Any) -> list[int]:
    return list(sequence.tokens[sequence.prompt_length :])


def test_rules_hold_in_random_schedules() -> None:
    preemptions = spoken = 0
    for seed in range(40):
        rng = random.Random(seed)
        loop = loop_over(
            num_pages=rng.choice([8, 16, 48]), page_size=rng.choice([2, 4]), max_model_len=64, max_num_batched_tokens=16
        )
        added = []
        for at in range(rng.randint(2, 7)):
            allowed = tuple(rng.sample(range(256), rng.choice([2, 5]))) if rng.random() < 0.7 else ()
            pairs = [(a, b) for a in allowed for b in allowed]
            bad = tuple(rng.sample(pairs, len(pairs) // 2)) if allowed else ((rng.randrange(256), 7),)
            params = SamplingParams(
                max_tokens=rng.choice([1, 12, 30]), seed=seed * 50 + at, allowed_token_ids=allowed, bad_words=bad
            )
            added.append(loop.add(Request(f"r{at}", (rng.choice(allowed or (1,)),), params)))
            loop.step()
        finish_all(loop)
        preemptions += loop.stats().preemptions
        for sequence in added:
            params, tokens = sequence.params, output(sequence)
            pairs_said = set(pairwise(tokens))
            assert not pairs_said & set(params.bad_words)
            spoken += len(tokens)
            if params.allowed_token_ids:
                assert set(tokens) <= set(params.allowed_token_ids)
            if sequence.finish is FinishReason.ERROR:
                assert sequence.error is not None
                assert "no token of this model may follow" in sequence.error
                after = {pair[1] for pair in params.bad_words if pair[0] == tokens[-1]}
                assert after >= set(params.allowed_token_ids), "it could have gone on"
            else:
                assert sequence.finish is FinishReason.LENGTH or tokens[-1] == EOS
    assert preemptions > 0
    assert spoken > 500


def test_a_grammar_that_is_complete_ends_although_its_end_is_not_allowed() -> None:
    loop = loop_over()
    params = SamplingParams(max_tokens=9, constraint=grammar.choice(["aa", "ab"]), allowed_token_ids=LETTERS, seed=1)
    sequence = loop.add(Request("r", (1,), params))
    finish_all(loop)
    assert (sequence.finish, sequence.complete) == (FinishReason.STOP, True)


def test_a_grammar_that_wants_what_is_not_allowed_is_an_error_that_says_so() -> None:
    loop = loop_over()
    wants = Constraint(ConstraintKind.REGEX, "ab1")
    sequence = loop.add(Request("r", (1,), SamplingParams(max_tokens=9, constraint=wants, allowed_token_ids=LETTERS)))
    finish_all(loop)
    assert output(sequence) == list(b"ab")
    assert sequence.finish is FinishReason.ERROR
    assert "allowed_token_ids and bad_words leave none" in str(sequence.error)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("shape:tiny", device="cpu", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32) as found:
        yield found


def test_on_the_device_and_the_same_in_company(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    free = llm.generate("abc", plain)[0].token_ids
    pair = free[4:6]
    ways: list[dict[str, Any]] = [
        {"bad_words": ((free[0],),)},
        {"bad_words": (pair,)},
        {"allowed_token_ids": LETTERS, "temperature": 1.0, "seed": 3, "min_tokens": 5},
        {"bad_words": ((free[0],), pair), "allowed_token_ids": tuple(free[:6])},
        {"allowed_token_ids": (free[2],), "logprobs": 2, "presence_penalty": 2.0},
    ]
    asked = [SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **way}) for way in ways]
    alone = [llm.generate("abc", one)[0] for one in asked]
    together = llm.generate(["abc"] * 6, [*asked, plain])
    assert [each.token_ids for each in together] == [*(each.token_ids for each in alone), free]
    assert free[0] not in alone[0].token_ids
    assert pair not in list(pairwise(alone[1].token_ids))
    assert alone[1].token_ids[:5] == free[:5]
    assert set(alone[2].token_ids) <= set(LETTERS)
    assert set(alone[3].token_ids) <= set(free[:6]) - {free[0]}
    assert alone[4].token_ids == [free[2]] * 30
    assert len(alone[4].outputs[0].logprobs or ()) == 30


def test_a_schema_beside_bad_words(llm: LLM) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    asked = SamplingParams(max_tokens=60, constraint=grammar.json_schema(schema, ""), bad_words=((ord("1"),), (50, 50)))
    for seed in range(6):
        found = llm.generate("x", SamplingParams(**{**_fields(asked), "seed": seed}))[0]
        assert found.outputs[0].finish is FinishReason.STOP
        jsonschema.validate(json.loads(found.text), schema)
        assert "1" not in found.text
        assert "22" not in found.text


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}
