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
    # Within a layer not everything is; whole layers always are, but for those with a state of each sequence.
    if whole.recurrent is not None:
        assert all("recurrent" in each for each in refused), refused
    else:
        assert len(refused) < 2, refused
