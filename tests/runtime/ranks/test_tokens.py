"""Several ranks on the CPU give the tokens of one, however the model is cut and whatever the scheduler does.

Every layer kind there is: grouped and replicated key-value heads, biases, windows, tied heads, norms of heads; files of
each format. Logits may differ in the last bits, because sums are taken in another order: equal tokens of random models
say that nothing else differs.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import real_models

from stoker_runtime import LLM
from stoker_runtime import SamplingParams as OfflineParams
from stoker_runtime.errors import ConfigError
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling_params import StructuredOutputsParams

Ranks = Callable[..., LLM]
Checkpoint = Callable[[str], Path]
SIZES: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks": 40, "max_num_seqs": 6}
CUTS = [(2, 1), (4, 1), (1, 2), (2, 2)]
EIGHT = [(8, 1), (4, 2)]


def workload(count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share prefixes and sampling of every kind."""
    rng = random.Random(count)
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 16, 33, 40])] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(4, 30),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            top_p=rng.choice([1.0, 0.8]),
            typical_p=rng.choice([1.0, 0.9]),
            seed=rng.getrandbits(32),
            presence_penalty=rng.choice([0.0, 0.8]),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(count)
    ]
    return prompts, params


def alone(model: str, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> list[list[int]]:
    given = {"device": "cpu", "dtype": "float32", "page_size": 16, "cpu_threads": 1, **SIZES, **options}
    with LLM(model, **given) as llm:
        return llm.generate_tokens(prompts, params)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("llama", CUTS),
        ("llama-eight-heads", EIGHT),
        ("llama-bias", [(2, 1), (1, 3)]),
        ("llama-tied", [(2, 2)]),
        ("mistral-window", [(4, 1)]),
        ("qwen2", [(1, 2)]),
        ("qwen3", [(2, 1)]),
    ],
)
def test_a_cut_model_gives_the_tokens_of_the_whole(
    name: str, cuts: list[tuple[int, int]], ranks: Ranks, tiny_checkpoint: Checkpoint
) -> None:
    model = str(tiny_checkpoint(name))
    prompts, params = workload(8, 128)
    whole = alone(model, prompts, params)
    for tensors, stages in cuts:
        sizes = {**SIZES, "tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
        with ranks(model, **sizes) as llm:
            assert llm.generate_tokens(prompts, params) == whole, (name, tensors, stages)


def test_crowding_caching_and_preemption_change_no_token(ranks: Ranks, tiny_checkpoint: Checkpoint) -> None:
    model = str(tiny_checkpoint("llama"))
    prompts, params = workload(16, 128)
    whole = alone(model, prompts, params, max_num_seqs=1, max_num_batched_tokens=128, enable_prefix_caching=False)
    crowded = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_gpu_blocks": 13, "num_cpu_blocks": 20}
    for tensors, stages in ((2, 1), (1, 2)):
        sizes = {**SIZES, **crowded, "tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
        with ranks(model, **sizes) as llm:
            assert llm.generate_tokens(prompts, params) == whole
            stats = llm.engine.stats()
            llm.engine.scheduler.check()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        assert stats.pages_used == 0


def test_layers_with_a_window_give_up_pages_on_every_rank(ranks: Ranks, tiny_checkpoint: Checkpoint) -> None:
    """Of seven layers six look back 9 tokens; texts are several blocks of keys long."""
    model, rng = str(tiny_checkpoint("gemma3")), random.Random(3)
    prompts = [[rng.randrange(3, 120) for _ in range(count)] for count in (170, 90, 12)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True) for _ in prompts]
    sizes = {"max_model_len": 256, "num_gpu_blocks": 90, "max_num_seqs": 3, "max_num_batched_tokens": 50}
    whole = alone(model, prompts, params, **sizes, disable_hybrid_kv_cache_manager=True, num_cpu_blocks=0)
    with ranks(model, **sizes, tensor_parallel_size=2) as llm:
        assert llm.engine.executor.sight is not None
        assert llm.generate_tokens(prompts, params) == whole
        llm.engine.scheduler.check()
        assert llm.engine.stats().pages_used == 0
    with ranks(model, **sizes, pipeline_parallel_size=2) as llm:
        assert llm.engine.executor.sight is None
        assert llm.generate_tokens(prompts, params) == whole


def test_masks_and_logprobs_of_tokens_and_prompts(ranks: Ranks) -> None:
    """Masks come from the host in the middle of a step; prompts are scored in chunks, some of them in two portions."""
    prompt = [random.randrange(3, 250) for _ in range(180)]
    pattern = "[0-9]{3}-[a-f]{4}"
    masked = OfflineParams(
        max_tokens=12, temperature=0.8, seed=4, structured_outputs=StructuredOutputsParams(regex=pattern)
    )
    scored = OfflineParams(max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    sizes = {**SIZES, "max_model_len": 256, "max_num_batched_tokens": 160}

    def outputs(llm: LLM) -> tuple[list[int], list[int], list[float]]:
        records = llm.generate([{"prompt_token_ids": prompt}] * 2, [masked, scored], use_tqdm=False)
        choices = [record.outputs[0] for record in records]
        assert re.fullmatch(pattern, choices[0].text)
        entries = [*records[1].prompt_logprobs[1:], *choices[1].logprobs]
        values = [entry.logprob for each in entries for entry in each.values()]
        return choices[0].token_ids, choices[1].token_ids, values

    with LLM("shape:tiny", device="cpu", dtype="float32", page_size=16, cpu_threads=1, **sizes) as llm:
        whole = outputs(llm)
    for tensors, stages in ((2, 1), (2, 2)):
        with ranks("shape:tiny", **sizes, tensor_parallel_size=tensors, pipeline_parallel_size=stages) as llm:
            *tokens, values = outputs(llm)
            assert (*tokens,) == whole[:2]
            assert values == pytest.approx(whole[2], abs=1e-4)


def test_where_they_met_is_there_until_they_have_ended(ranks: Ranks) -> None:
    """NCCL looks into it while they run, and its end waits for that thread: a store that is gone makes it wait, too."""
    before = meetings()  # of ranks that other tests lost: what may still look for them keeps them
    with ranks("shape:tiny", **SIZES, tensor_parallel_size=2) as llm:
        executor: Any = llm.engine.executor
        store = executor.decoder.collectives._store
        store.set_timeout(timedelta(seconds=2))
        assert not store.check(["what nobody has said"])
        assert len(meetings()) == len(before) + 1
    assert meetings() == before


def meetings() -> list[str]:
    """This process's descriptors of memory where ranks met."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs meanwhile
            found += [path.name] if "stoker-meeting" in os.readlink(path) else []
    return sorted(found)


def test_a_model_that_cannot_be_cut_is_refused(ranks: Ranks, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="sizes that work for this model: 1\\."):
        LLM(str(tiny_checkpoint("qwen2")), device="cpu", tensor_parallel_size=2)


SMOL_PROMPTS = [[504, 3575, 282, 4649, 314], [788, 257, 655, 1194, 506, 253, 1194, 288, 28, 665]]
SMOL: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks": 12}


@pytest.fixture(scope="module")
def smol_tokens() -> list[list[int]]:
    """What one rank of SmolLM2 says."""
    return alone(str(real_models.smollm2()), SMOL_PROMPTS, [SamplingParams(max_tokens=8, ignore_eos=True)] * 2, **SMOL)


@pytest.mark.parametrize(("tensors", "stages"), [(3, 1), (1, 2), (3, 2)])
def test_smollm2_cut_gives_the_tokens_of_the_whole(
    tensors: int, stages: int, ranks: Ranks, smol_tokens: list[list[int]]
) -> None:
    """The GGUF of the wheel: 9 heads and 3 key-value heads, and 30 layers."""
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    sizes = {**SIZES, **SMOL, "tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
    with ranks(str(real_models.smollm2()), **sizes) as llm:
        assert llm.generate_tokens(SMOL_PROMPTS, params) == smol_tokens


@pytest.mark.parametrize("tensors", [2, 4])
def test_smollm2_is_refused_where_its_heads_do_not_divide(tensors: int) -> None:
    says = f"tensor_parallel_size is {tensors}, but .*9.*; sizes that work for this model: 1, 3\\."
    with pytest.raises(ConfigError, match=says):
        LLM(str(real_models.smollm2()), device="cpu", tensor_parallel_size=tensors)
