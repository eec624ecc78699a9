"""Constraints on the real executor: the device's sampler under masks, with every kind of sampling parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint, ConstraintKind, FinishReason
from stoker_runtime.sampling import grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = grammar.json_schema(SCHEMA, "")
PROMPT = "Give me a person."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("shape:tiny", device="cpu", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32) as found:
        yield found


def test_every_sampling_parameter(llm: LLM) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 1},
        {"top_k": 3, "seed": 2},
        {"top_p": 0.2, "min_p": 0.1, "seed": 3},
        {"typical_p": 0.4, "top_k": 50, "seed": 8},
        {"bad_words": ((ord("a"), ord("a")), (ord("9"),)), "seed": 9},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 2.0, "seed": 4},
        {"logit_bias": ((ord("x"), 100.0), (ord('"'), -100.0)), "seed": 5},
        {"logprobs": 2, "prompt_logprobs": 0, "seed": 6},
        {"min_tokens": 100, "ignore_eos": True, "seed": 7},
    ]
    asked = [SamplingParams(max_tokens=120, constraint=PERSON, **way) for way in ways]
    free = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([PROMPT] * len(ways) + ["free"], [*asked, free])
    assert outputs[-1].token_ids == llm.generate("free", free)[0].token_ids, "a neighbour's masks were felt"
    for way, output in zip(ways, outputs[:-1], strict=True):
        if output.outputs[0].finish is FinishReason.LENGTH:
            assert len(output.token_ids) == 120, way
        else:
            assert output.outputs[0].finish is FinishReason.STOP, way
            jsonschema.validate(json.loads(output.text), SCHEMA)
    assert sum(output.outputs[0].finish is FinishReason.STOP for output in outputs) >= len(ways) // 2
    scored = next(output for way, output in zip(ways, outputs, strict=False) if "logprobs" in way)
    assert len(scored.outputs[0].logprobs or ()) == len(scored.token_ids)


def test_length_is_said_only_where_the_length_is_reached(llm: LLM) -> None:
    endless = Constraint(ConstraintKind.REGEX, "[a-z]*")
    asked = SamplingParams(max_tokens=300, constraint=endless, ignore_eos=True, temperature=0.0)
    [whole] = llm.generate("x", replace(asked, max_tokens=100))
    assert (whole.outputs[0].finish, len(whole.token_ids), whole.outputs[0].stop_reason) == (
        FinishReason.LENGTH,
        100,
        None,
    )
    # A context of 256 tokens leaves 129 behind a prompt of 127, and the answer says that this was why.
    [cut] = llm.generate([[7] * 127], asked)
    assert (cut.outputs[0].finish, len(cut.token_ids)) == (FinishReason.LENGTH, 129)
    assert cut.outputs[0].stop_reason == "max_model_len"


def test_a_seed_gives_the_same_alone_and_in_company(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=100, constraint=PERSON, seed=11)
    others = [SamplingParams(max_tokens=100, constraint=PERSON, seed=seed) for seed in range(3)]
    alone = llm.generate(PROMPT, asked)[0]
    assert llm.generate([PROMPT] * 4, [*others, asked])[3].token_ids == alone.token_ids


def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed character class"):
        llm.generate(["a", "b"], SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "[")))
    assert not llm.engine.has_work
