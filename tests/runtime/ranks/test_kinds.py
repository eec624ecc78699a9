"""Kinds of layer beyond Llama's over ranks: post-norms, soft-caps, parallel blocks, layer norms, learned positions."""

from __future__ import annotations

import random
from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("name", "tensors", "stages", "sizes"),
    [
        ("Gemma2ForCausalLM", 2, 2, EVEN | {"head_dim": 16}),
        ("CohereForCausalLM", 4, 1, EVEN),
        ("NemotronForCausalLM", 2, 1, EVEN | {"head_dim": 16}),
        ("GPT2LMHeadModel", 1, 3, {}),
        ("Olmo2ForCausalLM", 1, 2, {}),
    ],
)
def test_a_cut_model_of_another_kind_gives_the_tokens_of_the_whole(
    name: str, tensors: int, stages: int, sizes: dict[str, int], ranks: Callable[..., LLM], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    print(f"seed {test_zoo.SEED}")
    row = test_zoo.ROWS[name]
    changed = test_zoo.Row(row.config, lambda rng: row.changes(rng) | sizes, row.published, row.settings)
    monkeypatch.setitem(test_zoo.ROWS, name, changed)
    test_zoo._checkpoint(name, tmp_path)
    rng = random.Random(test_zoo.SEED)
    prompts = [[rng.randrange(3, 90) for _ in range(count)] for count in (37, 3)]
    params = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, temperature=1.0, seed=5)]
    whole = alone(str(tmp_path), prompts, params, runner="generate")
    cut = {"runner": "generate", "tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
    with ranks(str(tmp_path), **SIZES, **cut) as llm:
        assert llm.generate_tokens(prompts, params) == whole


@pytest.mark.parametrize("name", test_zoo.ROWS)
def test_each_architecture_is_cut_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """What is cut loads on every rank: names, shapes and windows of its files are right."""
    print(f"seed {test_zoo.SEED}")
    test_zoo._checkpoint(name, tmp_path)
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
    assert len(refused) < 2 or "experts" in refused[1], refused
