"""Sampling through the engine: seeds do not depend on the batch, and parameters reach the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    built = build_executor(EngineConfig(model="shape:tiny", device="cpu", max_model_len=256, max_num_seqs=8))
    yield built
    built.close()


def generate(executor: Executor, *params: SamplingParams) -> list[list[int]]:
    """Run one sequence for each of `params` at once, each with a prompt of its own number."""
    loop = StepLoop(executor, EngineConfig(model="shape:tiny"))
    sequences = [loop.add(Request(str(i), (7, 8, 9 + i % 2), each)) for i, each in enumerate(params)]
    while loop.has_work:
        loop.step()
    loop.scheduler.check()
    return [list(sequence.tokens[sequence.prompt_length :]) for sequence in sequences]


def params(**fields: object) -> SamplingParams:
    base = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 11}
    return SamplingParams(**(base | fields))  # type: ignore[arg-type]


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(executor: Executor) -> None:
    alone = generate(executor, params())[0]
    beside = generate(executor, params(), params(seed=5), params(temperature=0.0), params(top_k=3, seed=1))
    penalized = generate(executor, params(), params(presence_penalty=1.0, seed=2))
    assert beside[0] == alone == penalized[0]
    assert generate(executor, params(seed=12))[0] != alone


EVERY_WAY: list[dict[str, object]] = [
    {},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"typical_p": 0.5},
    {"logit_bias": ((9, 2.0),), "frequency_penalty": 0.5},
    {"bad_words": ((65,), (66, 67))},
    {"allowed_token_ids": tuple(range(60, 120))},
    {"temperature": 0.0},
]


def test_every_way_of_sampling_gives_the_same_alone_and_beside_all_others(executor: Executor) -> None:
    asked = [params(**{"seed": seed, **way}) for seed, way in enumerate(EVERY_WAY)]
    # Prompts differ by place, so each runs alone at its own.
    alone = [generate(executor, *[asked[at]] * (at + 1))[at] for at in range(len(asked))]
    assert generate(executor, *asked) == alone
    assert len(set(map(tuple, alone))) == len(asked)


def test_greedy_rows_stay_greedy_beside_sampled_ones(executor: Executor) -> None:
    alone = generate(executor, params(temperature=0.0))[0]
    assert generate(executor, params(temperature=0.0), params(seed=3))[0] == alone


def test_slots_are_clean_when_reused(executor: Executor) -> None:
    before = generate(executor, params(temperature=0.0))[0]
    generate(executor, *[params(temperature=0.0, logit_bias=((5, 100.0),)) for _ in range(8)])
    assert generate(executor, params(temperature=0.0), params())[0] == before


def test_bias_decides(executor: Executor) -> None:
    assert generate(executor, params(logit_bias=((42, 100.0),)))[0] == [42] * 20


def test_a_presence_penalty_of_two_forbids_repeats_where_logits_are_close(executor: Executor) -> None:
    plain = generate(executor, params(temperature=0.0))[0]
    penalized = generate(executor, params(temperature=0.0, presence_penalty=2.0))[0]
    assert len(set(plain)) < len(plain)
    assert len(set(penalized)) == len(penalized)


def test_min_tokens_hold_back_the_stop(executor: Executor) -> None:
    greedy = generate(executor, params(temperature=0.0))[0]
    stopped = generate(executor, params(temperature=0.0, stop_token_ids=(greedy[0],)))[0]
    held = generate(executor, params(temperature=0.0, stop_token_ids=(greedy[0],), min_tokens=5))[0]
    assert stopped == greedy[:1]
    assert len(held) >= 5
    assert greedy[0] not in held[:5]
