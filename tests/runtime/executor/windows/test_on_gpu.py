"""Pages that layers with a window give up, on a GPU in graphs: no token changes, nor is what lies in them read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.executor.windows.test_tables import KINDS, LONGEST, PAGE, SEED, greedy, run, save_random

from stoker_runtime import LLM
from stoker_runtime.request import Request

SIZES: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_model_len": LONGEST, "page_size": PAGE}
SIZES |= {"batch_invariant": True, "gpu_memory_utilization": 0.3}
# Of heads that the Hopper kernels have, and that they do not; fixed sums want multiples of 64 and of 8.
HEADS = {"wide": {"head_dim": 128, "hidden_size": 384}, "narrow": {"hidden_size": 64}}
EVEN = {"vocab_size": 128, "intermediate_size": 192}
VOCAB = 90


@pytest.fixture(params=[(kind, heads) for kind in KINDS for heads in HEADS], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind, heads = request.param
    save_random(kind, tmp_path, **EVEN, **HEADS[heads], **({"num_local_experts": 8} if kind == "gpt-oss" else {}))
    return str(tmp_path)


@pytest.mark.gpu
def test_a_crowd_in_a_tight_pool_gets_the_texts_of_one_that_keeps_all(model: str) -> None:
    """Chunks, decodes, prefix hits and preemptions."""
    rng = random.Random(SEED)
    shared = [rng.randrange(3, VOCAB) for _ in range(260)]
    prompts = [shared[: rng.choice([0, 150, 260])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))]
               for _ in range(40)]  # fmt: skip
    params = [
        replace(greedy(rng.randint(30, 90)), temperature=rng.choice([0.0, 1.0]), seed=at) for at in range(len(prompts))
    ]
    whole = len(prompts) * LONGEST // PAGE
    with LLM(
        model, **SIZES, max_num_seqs=40, num_gpu_blocks=whole, disable_hybrid_kv_cache_manager=True
    ) as roomy:
        assert roomy.engine.executor.sight is None
        expected = roomy.generate_tokens(prompts, params)
    with LLM(model, **SIZES, max_num_seqs=1, num_gpu_blocks=1) as probe:
        sight = probe.engine.executor.sight
    tight = 4 * sight.pages(LONGEST)
    with LLM(model, **SIZES, max_num_seqs=24, max_num_batched_tokens=200, num_gpu_blocks=tight) as crowded:
        assert crowded.generate_tokens(prompts, params) == expected
        stats = crowded.engine.stats()
        assert int(crowded.engine.executor.describe()["graphs"]) > 0
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.pages_used == 0


@pytest.mark.gpu
def test_no_more_pages_are_held_than_are_in_sight_and_others_are_never_read(model: str) -> None:
    """Every page that no sequence holds is NaN after each step: given up, or not begun."""
    rng = random.Random(SEED + 1)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(count)) for count in (301, 9, 190)]
    texts = []
    for poison in (False, True):
        with LLM(
            model, **SIZES, max_num_seqs=3, max_num_batched_tokens=70, num_gpu_blocks=200, enable_prefix_caching=False
        ) as llm:
            sight = llm.engine.executor.sight
            running = [llm.engine.add(Request(str(at), prompt, greedy(60))) for at, prompt in enumerate(prompts)]
            assert 0 < run(llm, running, poison=poison) <= -(-(sight.window + 63) // PAGE)
            texts.append([list(each.tokens) for each in running])
    assert texts[0] == texts[1]
