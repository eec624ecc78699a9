"""On two GPUs what one has: adapters, drafts, sleep, the same bits in any batch, its share of memory, and no step that
waits for the device. Models are random ones of a known shape.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.executor.test_memory_budget import in_a_process_of_its_own
from tests.runtime.executor.test_no_step_waits import CAPTURE, waits
from tests.runtime.ranks.test_two_gpus import NEAR, SIZES, free_bytes, workload

from stoker_kernels.launch import dispatch
from stoker_runtime import LLM, LoRARequest
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.config import EngineConfig
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices"),
]
MODEL = "shape:qwen2.5-7b@4"
TWO: dict[str, Any] = SIZES | {"tensor_parallel_size": 2}
GIB = 2**30


def drawn(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, greedy and sampled in turn, some with all that asks for logits on one rank."""
    prompts, params = workload(1000)
    rng = random.Random(seed)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 30, "min_p": 0.02},
        {"repetition_penalty": 1.2}, {"logprobs": 2}, {"temperature": 0.7, "presence_penalty": 0.3, "logprobs": 0},
    ]  # fmt: skip
    return prompts, [replace(each, seed=at, **rng.choice(ways)) for at, each in enumerate(params)]


@pytest.mark.parametrize("options", [{}, {"disable_custom_all_reduce": True}, {"quantization": "fp8"}])
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    seed = random.randrange(10**6)
    prompts, params = drawn(seed)
    with LLM(MODEL, **TWO, **options) as llm:
        first = llm.generate_tokens(prompts, params)
        with waits() as planted:
            torch.ones(1, device="cuda").item()
        assert planted, "a wait is seen"
        with waits() as found:
            again = llm.generate_tokens(prompts, params)
    assert {each for each in found if not each.startswith(CAPTURE)} == set(), f"seed {seed}"
    assert again == first


def test_rows_have_adapters_of_their_own(tmp_path: Path) -> None:
    """Their first tokens are one GPU's, and no other adapter's."""
    spec = build_spec(read_source(MODEL))
    folders = write_adapters(spec, 3, 16, tmp_path)
    loras = [None, *(LoRARequest(path.name, at, str(path)) for at, path in enumerate(folders, 1))]
    prompts, params = workload(1000)
    asked = [loras[at % 4] for at in range(len(prompts))]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    found = []
    for sizes in (SIZES, TWO):
        with LLM(MODEL, **sizes, **options) as llm:
            for _ in range(2):  # then in graphs
                outputs = llm.generate(
                    [{"prompt_token_ids": each} for each in prompts], params, lora_request=asked, use_tqdm=False
                )
                while llm.engine.executor.idle():
                    pass
                found.append([tuple(each.outputs[0].token_ids) for each in outputs])
            plain = llm.generate_tokens(prompts, params)
    assert found[2] == found[3]
    same = sum(mine[0] == theirs[0] for mine, theirs in zip(found[2], found[0], strict=True))
    assert same >= NEAR * len(prompts), (same, len(prompts))
    # What is multiplied beside adapters is rounded otherwise, so that a near tie may fall otherwise, too.
    others = Counter(lora for lora, one, base in zip(asked, found[2], plain, strict=True) if one[0] != base[0])
    assert others[None] <= 1, others
    assert all(others[lora] >= 4 for lora in loras[1:]), others


@pytest.mark.parametrize("method", [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}])
def test_drafts_change_no_token(method: dict[str, Any], tmp_path: Path) -> None:
    """With sums in one order, token for token; of so few words that some come again."""
    config = {**read_source(MODEL).config, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = random.Random(3)
    phrase = [rng.randrange(3, 128) for _ in range(40)]
    prompts = [phrase * 4 + phrase[:at] for at in range(9)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * len(prompts)
    drafts = json.dumps({**method, "num_speculative_tokens": 3})
    found = []
    for options in ({}, {"speculative_config": drafts}):
        with LLM(f"shape:{tmp_path}", **TWO, batch_invariant=True, **options) as llm:
            found.append(llm.generate_tokens(prompts, params))
            stats = llm.engine.stats()
        dispatch.demand_invariance(False)
    assert found[0] == found[1]
    assert stats.draft_tokens > 0


def test_ranks_sleep_and_wake() -> None:
    prompts, params = workload(1000)
    model = "shape:qwen2.5-7b"
    with LLM(model, **TWO, enable_sleep_mode=True) as llm:
        awake, before = free_bytes(), llm.generate_tokens(prompts, params)
        llm.sleep(1)
        given = [now - then for now, then in zip(free_bytes(), awake, strict=True)]
        assert min(given) > 6 * GIB, given  # half of the weights each
        llm.wake_up()
        assert llm.generate_tokens(prompts, params) == before


def test_a_request_has_the_same_bits_alone_and_in_a_crowd() -> None:
    prompts, params = drawn(random.randrange(10**6))
    params = [replace(each, logprobs=1) for each in params]
    crowds: list[list[list[int]]] = [[[at] for at in range(len(prompts))], [list(range(len(prompts)))]]
    found = []
    with LLM(MODEL, **TWO, batch_invariant=True) as llm:
        for groups in crowds:
            told: dict[int, Any] = {}
            for group in groups:
                asked = [{"prompt_token_ids": prompts[at]} for at in group]
                outputs = llm.generate(asked, [params[at] for at in group], use_tqdm=False)
                for at, output in zip(group, outputs, strict=True):
                    scores = output.outputs[0].logprobs
                    assert scores is not None
                    values = [{token: each.logprob for token, each in step.items()} for step in scores]
                    told[at] = (list(output.outputs[0].token_ids), values)
            found.append(told)
    dispatch.demand_invariance(False)
    assert found[0] == found[1]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_each_rank_keeps_its_budget(sizes: dict[str, int]) -> None:
    config = EngineConfig(model="shape:qwen2.5-7b", max_model_len=8192, gpu_memory_utilization=0.5, **sizes)
    free = free_bytes()
    taken = in_a_process_of_its_own(config)
    budget = 0.5 * taken.total
    off = [f"{(each - taken.before - budget) / budget:+.2%}" for each in (taken.built, *taken.loaded)]
    print(f"{sizes}: {', '.join(off)} of {budget / GIB:.1f} GiB beside {taken.before / GIB:.2f}")
    assert max(taken.loaded) <= budget + taken.before
    assert taken.loaded[-1] >= 0.97 * budget
    assert all(now > then - 64 * 2**20 for now, then in zip(free_bytes(), free, strict=True))
