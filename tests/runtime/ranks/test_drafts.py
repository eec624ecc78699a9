"""Drafts over several ranks: the answers of one rank without any, whoever drafts and whatever is accepted."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.executor.eagle_heads import quiet
from tests.runtime.executor.test_next_token_heads import SIZES as NEXT_SIZES
from tests.runtime.executor.test_next_token_heads import save_model
from tests.runtime.executor.test_speculation import build, random_llama, requests, serve, speculative

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.request import EngineStats

Ranks = Callable[..., LLM]
CROWDED = {"max_num_seqs": 7, "max_num_batched_tokens": 31, "num_gpu_blocks": 17, "num_cpu_blocks": 9}


def check(model: str, drafts: str, ranks: Ranks, seed: int, count: int = 24, **cut: Any) -> EngineStats:
    """Requests on ranks that draft, against one rank that does not."""
    plain = build(model, "", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=80)
    asked = requests(random.Random(seed), plain.vocab_size, count)
    expected, _ = serve(plain, asked, seed, enable_prefix_caching=False)
    plain.close()
    with ranks(model, max_model_len=96, speculative_config=drafts, **CROWDED, **cut) as llm:
        executor: Any = llm.engine.executor
        got, stats = serve(executor, asked, seed + 1, scheduling_policy="priority")
    for request in asked:
        mine, theirs = got[request.id], expected[request.id]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), request
        values = [(a.logprob, b.logprob) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)]
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in values), request
    assert stats.draft_tokens > stats.accepted_tokens > 0
    return stats


def two_part_llama(folder: Path, first: int) -> tuple[str, int]:
    """A random model of `random_llama` that two ranks can share each layer of, and both layers, and its seed."""
    for seed in range(first, first + 1000):
        model = random_llama(folder, seed)
        try:
            for cut in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
                places_of(model, **cut)
        except ConfigError:
            continue
        return model, seed
    raise AssertionError("no model of these seeds can be cut")


def places_of(model: str, *, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
    """Raises ConfigError where the model cannot be cut so."""
    from stoker_runtime.models.architectures import build_spec
    from stoker_runtime.models.config_source import read_source
    from stoker_runtime.parallel.place import Place
    from stoker_runtime.parallel.split import check_split

    check_split(build_spec(read_source(model)), Place(0, tensor_parallel_size, pipeline_parallel_size))


@pytest.mark.matrix("method")
@pytest.mark.parametrize(("tensors", "stages", "nodes"), [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_drafts_change_no_answer(
    method: str, tensors: int, stages: int, nodes: int, ranks: Ranks, tmp_path: Path
) -> None:
    model, seed = two_part_llama(tmp_path, 100 * len(method))
    cut = {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages, "nnodes": nodes}
    stats = check(model, speculative(model, method), ranks, seed, **cut)
    assert min(stats.preemptions, stats.prefix_hits) > 0, "the device was meant to be crowded"


def test_a_head_reads_the_states_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """EAGLE-3, with the model's embedding, which is cut by the vocabulary."""
    model, seed = two_part_llama(tmp_path, 40)
    check(quiet(model), speculative(model, "eagle3"), ranks, seed, tensor_parallel_size=2)


@pytest.mark.parametrize("kind", list(NEXT_SIZES))
def test_a_models_own_head_has_both_its_ends_from_all_ranks(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    model, _ = save_model(tmp_path, kind, 7)
    drafts = '{"method": "mtp", "num_speculative_tokens": 3}'
    check(model, drafts, ranks, 9, count=40, tensor_parallel_size=2, runner="generate")


def test_a_head_is_refused_over_stages() -> None:
    for named in ({"method": "eagle3", "model": "m"}, {"method": "mtp"}):
        drafts = json.dumps({**named, "num_speculative_tokens": 2})
        with pytest.raises(ConfigError, match="no pipeline_parallel_size"):
            EngineConfig("m", speculative_config=drafts, pipeline_parallel_size=2).validate()
        EngineConfig("m", speculative_config=drafts, tensor_parallel_size=2).validate()
