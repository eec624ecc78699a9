"""The real executor on the CPU under the real scheduler: how a batch is scheduled never changes what is generated."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.request import Request, SamplingParams

HIDDEN, LAYERS, VOCAB, HEADS, HEAD_DIM, FFN = 32, 2, 96, 4, 8, 48
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "page_size": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Llama."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    generator = torch.Generator().manual_seed(0)

    def random_weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": random_weight(VOCAB, HIDDEN),
        "lm_head.weight": random_weight(VOCAB, HIDDEN),
    }
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    kv = HEADS // 2 * HEAD_DIM
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{prefix}.self_attn.q_proj.weight"] = random_weight(HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}.self_attn.k_proj.weight"] = random_weight(kv, HIDDEN)
        tensors[f"{prefix}.self_attn.v_proj.weight"] = random_weight(kv, HIDDEN)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random_weight(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = random_weight(FFN, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = random_weight(FFN, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random_weight(HIDDEN, FFN)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def workload(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share prefixes, greedy and sampled, with and without penalties."""
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [shared[: rng.choice([0, 16, 33, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
               for _ in range(count)]  # fmt: skip
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.getrandbits(32),
            presence_penalty=rng.choice([0.0, 0.8]),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(count)
    ]
    return prompts, params


def test_crowding_changes_no_token(checkpoint: str) -> None:
    prompts, params = workload(24)
    with LLM(
        checkpoint, **SIZES, max_num_seqs=1, max_num_batched_tokens=128, num_gpu_blocks=8, enable_prefix_caching=False
    ) as roomy:
        alone = [roomy.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    with LLM(checkpoint, **SIZES, max_num_seqs=6, max_num_batched_tokens=24, num_gpu_blocks=14) as crowded:
        together = crowded.generate_tokens(prompts, params)
        stats = crowded.engine.stats()
        crowded.engine.scheduler.check()
    assert together == alone
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.pages_used == 0


@pytest.mark.parametrize("caching", [False, True])
def test_choices_of_one_prompt_share_its_pages_and_differ_by_their_seeds(checkpoint: str, caching: bool) -> None:
    prompt, seeds = tuple(range(3, 40)), range(5)
    asked = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in seeds]
    sizes = {**SIZES, "max_num_seqs": 5, "max_num_batched_tokens": 48, "enable_prefix_caching": caching}
    with LLM(checkpoint, **sizes, num_gpu_blocks=32) as llm:
        alone = [llm.generate_tokens([prompt], [one])[0] for one in asked]
    with LLM(checkpoint, **sizes, num_gpu_blocks=32) as llm:
        running = [llm.engine.add(Request(str(at), prompt, one, family="f")) for at, one in enumerate(asked)]
        llm.engine.step()
        llm.engine.step()
        assert len({tuple(each.pages[:2]) for each in running}) == 1
        assert len({each.pages[2] for each in running}) == 5
        assert llm.engine.scheduler.stats().pages_used == 2 + 5
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.scheduler.check()
    together = [list(each.tokens[each.prompt_length :]) for each in running]
    assert together == alone
    assert len(set(map(tuple, together))) == 5


def test_logprobs_agree_with_prompt_logprobs(checkpoint: str) -> None:
    with LLM(checkpoint, **SIZES, max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks=16) as llm:
        prompt = list(range(3, 40))
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)
        [first] = llm_outputs(llm, prompt, params)
        scored = replace(params, max_tokens=0, prompt_logprobs=2)
        [second] = llm_outputs(llm, [*prompt, *first["tokens"]], scored)
    assert len(second["prompt_logprobs"]) == len(prompt) + 9
    for one, other in zip(first["logprobs"], second["prompt_logprobs"][-10:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.rank == other.rank == 1
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def llm_outputs(llm: LLM, prompt: list[int], params: SamplingParams) -> list[dict[str, Any]]:
    """Run one prompt without a tokenizer, keeping the log-probabilities."""
    sequence = llm.engine.add(Request("r", tuple(prompt), params))
    gathered: dict[str, Any] = {"logprobs": [], "prompt_logprobs": []}
    while llm.engine.has_work:
        output = llm.engine.step()
        gathered["logprobs"] += output.logprobs
        for _, entries in output.prompt_logprobs:
            gathered["prompt_logprobs"] += entries
    gathered["tokens"] = sequence.tokens[sequence.prompt_length :].tolist()
    return [gathered]


async def test_the_engine_process_gives_the_same_tokens(checkpoint: str) -> None:
    prompts, params = workload(6)
    config = EngineConfig(model=checkpoint, **SIZES, max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks=24)
    with LLM.over(build(config), config) as llm:
        expected = llm.generate_tokens(prompts, params)
    async with await AsyncEngine.start(config, log_level="error") as engine:
        assert engine.ready.description["device"] == "cpu"
        requests = [
            Request(str(at), tuple(prompt), one) for at, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        stream, tokens, left = engine.submit(requests), [list[int]() for _ in requests], len(requests)
        while left:
            for output in await stream.next():
                tokens[int(output.request_id)] += output.tokens
                left -= output.finish is not None
    assert tokens == expected


def build(config: EngineConfig) -> Any:
    from stoker_runtime.ranks.build import build_executor

    return build_executor(config)
