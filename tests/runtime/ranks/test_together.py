"""Which steps ranks sample together, and which the leader alone: in both the tokens are those of one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.executor.test_speculation import speculative
from tests.runtime.ranks.test_drafts import two_part_llama
from tests.runtime.ranks.test_tokens import SIZES, alone

from stoker_runtime import LLM
from stoker_runtime.request import SamplingParams

Ranks = Callable[..., LLM]
Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=17, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)
TOGETHER = {"greedy": [GREEDY], "drawn": [DRAWN], "both": [GREEDY, DRAWN]}
BY_THE_LEADER = {
    "greedy logprobs": [GREEDY, replace(GREEDY, logprobs=2)],
    "drawn logprobs": [DRAWN, replace(DRAWN, logprobs=0)],
    "penalties": [DRAWN, replace(GREEDY, presence_penalty=0.7)],
    "bias": [GREEDY, replace(GREEDY, logit_bias=((9, 1.5),))],
    "typical": [DRAWN, replace(DRAWN, typical_p=0.8)],
}


def prompts(count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def gathers(llm: LLM) -> list[int]:
    """Of how many rows the leader has had all logits, gathering after gathering, from now on."""
    executor: Any = llm.engine.executor
    ends, counted = executor.decoder.collectives, []
    gather = ends.gather

    def counting(shard: Any, out: Any) -> Any:
        counted.append(len(out))
        return gather(shard, out)

    ends.gather = counting
    return counted


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize(("name", "tensors", "stages"), [("llama-tied", 2, 1), ("gemma2", 2, 2), ("llama", 4, 1)])
def test_logits_cross_where_one_rank_needs_them_all(
    name: str, tensors: int, stages: int, ranks: Ranks, tiny_checkpoint: Checkpoint
) -> None:
    model = str(tiny_checkpoint(name))
    asked = prompts(7, 128)
    cut = {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
    mixes = TOGETHER | BY_THE_LEADER
    params = {
        mix: [replace(kinds[at % len(kinds)], seed=31 * at) for at in range(len(asked))] for mix, kinds in mixes.items()
    }
    whole = {mix: alone(model, asked, each) for mix, each in params.items()}
    with ranks(model, **SIZES, **cut) as llm:
        counted = gathers(llm)
        for mix, each in params.items():
            counted.clear()
            assert llm.generate_tokens(asked, each) == whole[mix], mix
            assert bool(counted) == (mix in BY_THE_LEADER), mix
    assert whole["greedy"] == whole["greedy logprobs"] != whole["drawn"] == whole["drawn logprobs"]


def test_greedy_drafts_are_verified_together(ranks: Ranks, tmp_path: Path) -> None:
    model, _ = two_part_llama(tmp_path, 700)
    asked = [each * 3 for each in prompts(5, 60)]
    sizes = SIZES | {"max_model_len": 256, "num_gpu_blocks": 80, "max_num_batched_tokens": 256}
    for params, crosses in ((GREEDY, False), (DRAWN, True)):
        each = [replace(params, seed=at) for at in range(len(asked))]
        whole = alone(model, asked, each, **sizes)
        drafts = {"tensor_parallel_size": 2, "speculative_config": speculative(model, "ngram")}
        with ranks(model, **sizes, **drafts) as llm:
            counted = gathers(llm)
            assert llm.generate_tokens(asked, each) == whole
            assert llm.engine.stats().draft_tokens > 0
            assert bool(counted) == crosses
