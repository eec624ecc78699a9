"""Layers with a state beyond their rows: crowding, choices of one prompt, sleep, what a state takes, and refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.executor.test_real_executor import workload
from tests.runtime.models.test_zoo import save_random

from stoker_kernels.recurrence import scratch_values
from stoker_runtime import LLM, LoRARequest
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.arena import state_arena
from stoker_runtime.executor.drafts.plan import read_draft_model
from stoker_runtime.executor.launched import Launched
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.executor.state import refuse_beside_states, sequence_state_bytes
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.layer_specs.state_spec import SOLVED
from stoker_runtime.sampling_params import SamplingParams
from stoker_runtime.step.batch import Batch

HYBRIDS = ("NemotronHForCausalLM", "Qwen3NextForCausalLM", "NemotronHForCausalLM-mixture",
           "GraniteMoeHybridForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM")  # fmt: skip


@pytest.fixture(scope="module", params=HYBRIDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    save_random(request.param, made)
    return made


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 128, "page_size": 16, **changes
    }  # fmt: skip


def choices(llm: LLM, prompt: list[int], asked: SamplingParams) -> list[list[int]]:
    (request,) = llm.generate([{"prompt_token_ids": prompt}], asked)
    return [list(each.token_ids) for each in request.outputs]


@pytest.mark.parametrize("drafts", [False, True])
def test_crowding_changes_no_token(drafts: bool, folder: Path) -> None:
    """Chunks among decodes and sequences that are preempted and run anew, in slots that others had, and prefixes whose
    states are kept. And the same after a sleep that dropped all states.
    """
    prompts, drawn = workload(7)
    vocab = build_spec(read_source(str(folder))).vocab
    prompts = [[token % (vocab - 3) + 3 for token in prompt] for prompt in prompts]
    params = [replace(each, max_tokens=min(each.max_tokens, 24), ignore_eos=True) for each in drawn]  # to crowd
    lonely = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    with LLM(**options(folder, **lonely)) as roomy:
        alone = [roomy.generate_tokens([each], [one])[0] for each, one in zip(prompts, params, strict=True)]
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_gpu_blocks": 8, "enable_sleep_mode": True}
    asked = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}} if drafts else {}
    with LLM(**options(folder, **sizes, **asked)) as crowded:
        decide_by_chance(crowded.engine, random.Random(7))  # type: ignore[arg-type]
        assert crowded.generate_tokens(prompts, params) == alone
        stats = crowded.engine.stats()
        crowded.engine.scheduler.check()  # type: ignore[attr-defined]
        crowded.sleep(1)
        crowded.wake_up()
        assert crowded.generate_tokens(prompts[:4], params[:4]) == alone[:4]
    assert stats.preemptions > 0
    assert stats.prefix_queries > stats.prefix_hits > 0


def test_prefixes_are_not_computed_again(folder: Path) -> None:
    """Of prompts that begin alike the third computes no more than what is its own; tokens are those without a cache."""
    rng = random.Random(11)
    shared = [rng.randrange(3, 90) for _ in range(70)]
    prompts = [[*shared, *(rng.randrange(3, 90) for _ in range(rng.choice([1, 9, 30])))] for _ in range(6)]
    params = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, detokenize=False)] * 6
    with LLM(**options(folder, max_num_seqs=2, enable_prefix_caching=False)) as plain:
        expected = plain.generate_tokens(prompts, params)
        assert plain.engine.stats().prefix_queries == 0
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 50, "num_state_snapshots": 7}
    with LLM(**options(folder, **sizes)) as llm:
        computed = []
        execute = llm.engine.executor.execute  # type: ignore[attr-defined]

        def counting(batch: Batch) -> Launched:
            computed.append(sum(len(chunk.token_ids) for chunk in batch.prefills))
            return execute(batch)

        llm.engine.executor.execute = counting  # type: ignore[attr-defined]
        for at in range(2):
            assert llm.generate_tokens([prompts[at]], [params[at]]) == [expected[at]]
        computed.clear()
        assert llm.generate_tokens(prompts[2:], params[2:]) == expected[2:]
        whole = sum(map(len, prompts[2:]))
        # Four whole pages are shared.
        assert sum(computed) == whole - 4 * 64
        stats = llm.engine.stats()
        assert stats.prefix_hits >= 4 * 64
        assert stats.prefix_queries == sum(map(len, prompts))
        llm.engine.scheduler.check()  # type: ignore[attr-defined]


def test_conversations_of_an_adapter_go_on_from_its_own_states(folder: Path, tmp_path: Path) -> None:
    spec = build_spec(read_source(str(folder)))
    adapters = write_adapters(spec, 2, 3, tmp_path)
    rng = random.Random(2)
    prompt = [rng.randrange(3, 90) for _ in range(50)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    given: list[LoRARequest | None] = [
        None, *(LoRARequest(path.name, at, str(path)) for at, path in enumerate(adapters, 1))
    ]  # fmt: skip
    sizes = options(folder, max_num_seqs=3, enable_lora=True, max_loras=2, max_lora_rank=8)
    found: list[list[list[int]]] = []
    for caching in (False, True):
        with LLM(**sizes, enable_prefix_caching=caching, num_state_snapshots=15 * caching) as llm:
            turns, sums = [], set()
            prompts = [prompt] * 3
            for _ in range(3):
                outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, lora_request=given)
                texts = [list(each.outputs[0].token_ids) for each in outputs]
                sums |= {each.outputs[0].cumulative_logprob for each in outputs}
                prompts = [[*each, *text, 7, 5] for each, text in zip(prompts, texts, strict=True)]
                turns += texts
            found.append(turns)
            hits = llm.engine.stats().prefix_hits
            assert len(sums) == 9, "adapters have to be told apart by their log-probabilities"
            # The second turn goes on behind 64 of the first one's 70 tokens, the third behind 80 of 92.
            assert hits == (3 * (64 + 80) if caching else 0)
    assert found[0] == found[1]


def test_snapshots_that_nothing_would_keep_are_refused(folder: Path) -> None:
    spec = build_spec(read_source(str(folder)))
    asked = EngineConfig(model=str(folder), num_state_snapshots=3, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="whose prefix cache is off"):
        resolve(asked, spec, "cpu")
    dense = build_spec(read_source("shape:tiny"))
    with pytest.raises(ConfigError, match="whose layers keep no state"):
        resolve(replace(asked, enable_prefix_caching=True), dense, "cpu")
    assert resolve(EngineConfig("m", max_num_seqs=22), spec, "cpu").num_state_snapshots == 11
    assert resolve(EngineConfig("m", enable_prefix_caching=False), spec, "cpu").num_state_snapshots == 0


def test_choices_of_one_prompt_have_states_of_their_own(folder: Path) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(3, 90) for _ in range(40)]
    asked = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    with LLM(**options(folder, max_num_seqs=3, tokenizer="shape:tiny")) as side_by_side:
        together = choices(side_by_side, prompt, asked)
    with LLM(**options(folder, max_num_seqs=1, tokenizer="shape:tiny")) as one_by_one:
        apart = choices(one_by_one, prompt, asked)
    assert together == apart
    assert len(set(map(tuple, together))) > 1


def test_bytes_of_states_are_those_of_the_arena(folder: Path) -> None:
    spec = build_spec(read_source(str(folder)))
    for dtype in ("float32", "bfloat16"):
        config = resolve(EngineConfig(model=str(folder), dtype=dtype), spec, "cpu")
        states = state_arena(3, spec, getattr(torch, dtype), torch.device("cpu"))
        assert sum(state.nbytes for state in states) == 3 * sequence_state_bytes(config, spec) > 0
    assert spec.kv_bytes_per_token("float32") == len(spec.attending) * 2 * spec.kv_size * 4
    assert shape_of(folder)["layers"] == len(spec.attending) < spec.num_layers
    assert scratch_values(7) == 7 * SOLVED
    assert shape_of(folder)["loraLine"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_lora": True, "tensor_parallel_size": 2}, "enable_lora cannot go with"),
        ({"kv_events_config": KvEventsConfig(enable_kv_cache_events=True)}, "kv_events_config cannot go with"),
    ],
)
def test_what_a_state_does_not_go_with_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    spec = build_spec(read_source(str(folder)))
    with pytest.raises(ConfigError, match=message):
        refuse_beside_states(EngineConfig(model=str(folder), **changes), spec)


def test_a_model_with_states_drafts_for_none(folder: Path) -> None:
    spec = build_spec(read_source(str(folder)))
    drafting = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
    config = EngineConfig(model="m", speculative_config=drafting, max_model_len=128)
    with pytest.raises(ConfigError, match="cannot go back to before a draft"):
        read_draft_model(config, spec)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (HYBRIDS[0], {"layers_block_type": ["rwkv", "mamba"]}, "'rwkv' blocks are not supported"),
        (HYBRIDS[0], {"layers_block_type": None, "hybrid_override_pattern": "M-"}, "of mamba and of attention"),
        (HYBRIDS[0], {"time_step_limit": [0.01, 1.0]}, "time_step_limit"),
        (HYBRIDS[0], {"residual_in_fp32": True}, "residual_in_fp32"),
        (HYBRIDS[1], {"layer_types": ["linear_attention", "sliding_attention"]}, "'sliding_attention'"),
        (HYBRIDS[1], {"attention_bias": True}, "attention_bias"),
        (HYBRIDS[1], {"linear_num_value_heads": 7, "linear_num_key_heads": 3}, "7 heads"),
        (HYBRIDS[3], {"position_embedding_type": "learned"}, "position_embedding_type is 'learned'"),
        (HYBRIDS[3], {"layer_types": ["mamba", "moe", "mamba", "mamba"]}, "4 entries for 4 layers, with 'moe'"),
        (HYBRIDS[3], {"layer_types": ["mamba", "attention", "mamba"]}, "3 entries for 4 layers, all known"),
        (HYBRIDS[3], {"mamba_d_head": 7}, "mamba_d_head 7 are not the"),
        (HYBRIDS[3], {"hidden_act": "gelu"}, "gelu"),
        (HYBRIDS[5], {"attn_output_gate": False}, "attn_output_gate is false"),
        (HYBRIDS[5], {"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 5 layers"),
    ],
)
def test_settings_that_are_not_understood(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ModelError, match=message):
        build_spec(read_source(str(tmp_path)))
