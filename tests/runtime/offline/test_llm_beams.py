"""Beam search in this process: the beams that an exhaustive search finds, and nothing left in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from stoker_runtime import LLM, BeamSearchParams, SamplingParams
from stoker_runtime.errors import RequestError

LETTERS = 256


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("shape:tiny", device="cpu", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64) as found:
        yield found


def total(llm: LLM, prompt: list[int], more: list[int]) -> float:
    """The log-probability of `more` after `prompt`, read off as a prompt."""
    [output] = llm.generate([prompt + more], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0))
    assert output.prompt_logprobs is not None
    return sum(
        entry[token].logprob for token, entry in zip(more, output.prompt_logprobs[-len(more) :], strict=True) if entry
    )


def test_the_beams_are_the_likeliest(llm: LLM) -> None:
    prompt = [5, 9, 11]
    params = BeamSearchParams(beam_width=4, max_tokens=2, ignore_eos=True)
    [found] = llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert [len(each.tokens) for each in found.sequences] == [5] * 4
    for sequence in found.sequences:
        assert sequence.cum_logprob == pytest.approx(total(llm, prompt, sequence.tokens[3:]), abs=1e-3)
        assert [next(iter(entry)) for entry in sequence.logprobs] == sequence.tokens[3:]
    # Whatever two of the likeliest first tokens go on with is no better than what was found.
    [step] = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=4, temperature=0.0))
    assert step.outputs[0].logprobs is not None
    firsts = list(step.outputs[0].logprobs[0])[:4]
    best = max(total(llm, prompt, [first, second]) for first, second in product(firsts, range(0, LETTERS, 16)))
    assert found.sequences[0].cum_logprob >= best - 1e-3
    assert not llm.engine.has_work


def test_a_width_of_one_is_greedy(llm: LLM) -> None:
    greedy = llm.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0].token_ids
    [found] = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True))
    assert found.sequences[0].tokens == [*b"abc", *greedy]
    assert found.sequences[0].finish_reason == "length"


def test_beams_end_where_the_context_does(llm: LLM) -> None:
    longest = llm.engine.scheduler.config.max_tokens
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    found = llm.beam_search([[7] * (longest - 3), [7] * 5], params)
    assert [len(each.sequences[0].tokens) for each in found] == [longest, 55]


@pytest.mark.parametrize(("field", "value"), [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0)])
def test_what_cannot_be_searched(llm: LLM, field: str, value: int) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    setattr(params, field, value)
    with pytest.raises(RequestError, match=f"{field} must be"):
        llm.beam_search("a", params)
