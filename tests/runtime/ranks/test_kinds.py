"""Kinds of layer beyond Llama's over ranks: post-norms, soft-caps, parallel blocks, layer norms, learned positions,
sinks; mixtures of experts, cut or shared whole, in every way that files hold them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models import test_zoo
from tests.runtime.ranks.test_tokens import SIZES, alone

from stoker_runtime import LLM
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.request import SamplingParams
from stoker_runtime.weights.load import load_weights

# Sizes that four ranks can share, but for the vocabulary.
EVEN = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# Experts of another width than the dense one, and of numbers that ranks do not share evenly.
EXPERTS = EVEN | {"num_experts": 7, "moe_intermediate_size": 36}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
LOCAL = EVEN | {"num_experts": None, "num_local_experts": 5, "head_dim": 16, "intermediate_size": 64}

# Heads with a state: whole groups a rank, and groups that ranks share.
MAMBA = EVEN | {"mamba_num_heads": 8, "n_groups": 4, "conv_kernel": 3, "head_dim": 16}
MAMBA_SHARED = MAMBA | {"n_groups": 2, "mamba_head_dim": 6, "ssm_state_size": 10, "conv_kernel": 4}
MAMBA_EXPERTS = MAMBA | {"moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 20}
DELTA = SHARED | {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 10, "linear_value_head_dim": 6,
    "head_dim": 16,
}  # fmt: skip
DELTA_SHARED = DELTA | {"linear_num_key_heads": 2, "linear_conv_kernel_dim": 3}
DENSE_DELTA = {key: value for key, value in DELTA.items() if not key.startswith(("moe_", "shared_", "num_experts"))}
GRANITE = EVEN | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_head": 16, "shared_intermediate_size": 20}

# As published: Q, K and V one behind the other; a KV head's in a group of rows, gate and up in turn.
BAICHUAN = {"num_attention_heads": 4, "hidden_size": 48, "intermediate_size": 60}
PHI = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "ff_intermediate_size": 68}


@pytest.mark.matrix(take=14)
@pytest.mark.parametrize(
    ("name", "tensors", "stages", "sizes", "whole_experts"),
    [
        ("Gemma2ForCausalLM", 2, 2, EVEN | {"head_dim": 16}, False),
        ("CohereForCausalLM", 4, 1, EVEN, False),
        ("NemotronForCausalLM", 2, 1, EVEN | {"head_dim": 16}, False),
        ("GPT2LMHeadModel", 1, 3, {}, False),
        ("Olmo2ForCausalLM", 1, 2, {}, False),
        ("Qwen2MoeForCausalLM", 2, 2, SHARED, False),
        ("Qwen2MoeForCausalLM", 4, 1, SHARED, True),
        ("GraniteMoeForCausalLM", 2, 1, LOCAL | {"head_dim": None}, False),
        ("Glm4MoeForCausalLM", 2, 1, EVEN | {"head_dim": 16, "moe_intermediate_size": 20}, False),
        ("GptOssForCausalLM", 2, 1, LOCAL, False),
        ("DeepseekV3ForCausalLM", 2, 2, EVEN | {"num_key_value_heads": 4, "moe_intermediate_size": 20}, False),
        ("GptOssForCausalLM", 2, 2, LOCAL, True),
        ("Phi3SmallForCausalLM", 1, 2, {}, False),
        ("BaichuanForCausalLM-2-13b", 1, 3, {}, False),
        ("BloomForCausalLM", 1, 2, {}, False),
        ("Olmo2ForCausalLM", 4, 1, EVEN | {"head_dim": None}, False),
        ("Exaone4ForCausalLM", 2, 2, EVEN | {"head_dim": 16, "num_hidden_layers": 5}, False),
        ("GPT2LMHeadModel", 2, 1, {"n_head": 6, "n_embd": 48}, False),
        ("BloomForCausalLM", 2, 2, {"n_head": 6, "hidden_size": 60}, False),
        ("BaichuanForCausalLM-2-13b", 4, 1, BAICHUAN, False),
        ("Phi3SmallForCausalLM", 4, 1, PHI, False),
        ("Phi3SmallForCausalLM", 2, 1, PHI | {"num_attention_heads": 6, "hidden_size": 72}, False),
        ("Phi3SmallForCausalLM-unscaled", 2, 1, PHI, False),
        ("Phi3ForCausalLM", 5, 1, {"intermediate_size": 65}, False),
        ("StableLmForCausalLM-parallel", 2, 1, EVEN, False),
        ("Ministral3ForCausalLM", 2, 2, EVEN | {"head_dim": 20}, False),
        ("HunYuanDenseV1ForCausalLM", 2, 1, EVEN | {"head_dim": 12}, False),
        ("MiniMaxM2ForCausalLM", 4, 1, LOCAL | {"head_dim": 24}, False),
        ("Ernie4_5_MoeForCausalLM", 2, 2, EVEN | {"head_dim": 16, "moe_intermediate_size": 28}, False),
        ("GPTJForCausalLM", 2, 1, {"n_head": 6, "n_embd": 48}, False),
        ("GPTBigCodeForCausalLM", 2, 1, {"n_head": 6, "n_embd": 48}, False),
        ("FalconForCausalLM-one-kv-head", 4, 1, {"ffn_hidden_size": 92}, False),
        ("FalconForCausalLM-few-kv-heads", 2, 1, {}, False),
        ("MptForCausalLM", 2, 1, {"n_heads": 6, "d_model": 48}, False),
        ("InternLM2ForCausalLM", 2, 1, {"intermediate_size": 58}, False),
        ("NemotronHForCausalLM", 2, 1, MAMBA | {"mamba_num_heads": 6, "n_groups": 2}, False),
        ("NemotronHForCausalLM", 4, 1, MAMBA, False),
        ("NemotronHForCausalLM", 4, 1, MAMBA_SHARED, False),
        ("NemotronHForCausalLM", 1, 2, {}, False),
        ("NemotronHForCausalLM", 1, 4, {}, False),
        ("NemotronHForCausalLM-biased", 2, 2, MAMBA | {"n_groups": 1}, False),
        ("NemotronHForCausalLM-mixture", 2, 1, MAMBA_EXPERTS, False),
        ("NemotronHForCausalLM-mixture", 4, 1, MAMBA_EXPERTS | {"n_groups": 2}, True),
        ("NemotronHForCausalLM-mixture-first", 1, 2, {}, False),
        ("Qwen3NextForCausalLM", 2, 1, DELTA | {"linear_num_value_heads": 12}, False),
        ("Qwen3NextForCausalLM", 4, 1, DELTA, False),
        ("Qwen3NextForCausalLM", 4, 1, DELTA_SHARED, True),
        ("Qwen3NextForCausalLM", 1, 2, {}, False),
        ("Qwen3NextForCausalLM", 2, 2, DELTA_SHARED, False),
        ("Qwen3_5ForConditionalGeneration", 2, 1, DENSE_DELTA, False),
        ("Qwen3_5MoeForConditionalGeneration", 2, 2, DELTA_SHARED, True),
        ("GraniteMoeHybridForCausalLM", 2, 1, GRANITE, False),
    ],
)
def test_a_cut_model_of_another_kind_gives_the_tokens_of_the_whole(
    name: str, tensors: int, stages: int, sizes: dict[str, int], whole_experts: bool, ranks: Callable[..., LLM],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    print(f"seed {test_zoo.SEED}")
    row = test_zoo.ROWS[name]
    changed = replace(row, changes=lambda rng: row.changes(rng) | sizes)
    monkeypatch.setitem(test_zoo.ROWS, name, changed)
    test_zoo.save_random(name, tmp_path)
    rng = random.Random(test_zoo.SEED)
    prompts = [[rng.randrange(3, 90) for _ in range(count)] for count in (37, 3)]
    params = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, temperature=1.0, seed=5)]
    whole = alone(str(tmp_path), prompts, params, runner="generate")
    cut = {"runner": "generate", "tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
    with ranks(str(tmp_path), **SIZES, **cut, enable_expert_parallel=whole_experts) as llm:
        assert llm.generate_tokens(prompts, params) == whole


@pytest.mark.parametrize("name", test_zoo.ROWS)
def test_each_architecture_is_cut_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """What is cut loads on every rank: names, shapes and windows of its files are right."""
    print(f"seed {test_zoo.SEED}")
    test_zoo.save_random(name, tmp_path)
    source = read_source(str(tmp_path))
    whole = build_spec(source)
    refused = []
    for tensors, stages in ((whole.heads, 1), (1, 2)):
        try:
            cuts: list[Any] = [Cut(whole, place) for place in places(tensors, stages)]
        except (ConfigError, ModelError) as error:
            refused.append(error.message)
            continue
        for cut in cuts:
            load_weights(source, cut.spec, torch.device("cpu"), torch.float32, cut=cut)
    # By heads alone something may not divide; whole layers always do.
    assert len(refused) < 2, refused
    assert all("sizes that work" in each for each in refused), refused
