"""Adapters of models whose layers keep a state, and of merged projections: the tokens of PEFT's merged models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.adapters.peft_folders import greedy, load_base, make_adapter, merged
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.models.test_zoo import save_random

from stoker_runtime import LLM, LoRARequest, SamplingParams
from stoker_runtime.adapters.files import read_adapter
from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 96, "page_size": 16, "max_num_seqs": 5,
    "max_num_batched_tokens": 24, "num_gpu_blocks": 30, "enable_lora": True, "max_loras": 2, "max_lora_rank": 12,
    "generation_config": "none",
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Of each model what is adapted: all there is, what its states alone read and give, and some by a pattern.
TARGETS: dict[str, list[dict[str, Any]]] = {
    "NemotronHForCausalLM": [
        {"r": 5, "target_modules": [*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj"]},
        {"r": 3, "lora_alpha": 11, "target_modules": ["in_proj", "out_proj"], "use_rslora": True},
        {
            "r": 2, "lora_alpha": 13, "target_modules": r".*\.layers\.[03]\.mixer\.(in_proj|q_proj)",
            "rank_pattern": {"q_proj": 9},
        },
    ],
    "NemotronHForCausalLM-mixture": [
        {"r": 4, "target_modules": [*ATTENTION, "in_proj", "shared_experts.up_proj", "shared_experts.down_proj"]},
        {"r": 7, "lora_alpha": 60, "target_modules": ["shared_experts.down_proj"]},
    ],
    "Qwen3NextForCausalLM": [
        {
            "r": 4,
            "target_modules": [
                *ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj", "up_proj", "down_proj",
            ],
        },
        {"r": 11, "lora_alpha": 50, "target_modules": ["in_proj_ba", "q_proj"]},
        {
            "r": 1, "lora_alpha": 9, "target_modules": ["in_proj_qkvz", "shared_expert.up_proj"],
            "layers_to_transform": [0, 3],
        },
    ],
    "Qwen3_5ForCausalLM": [
        {"r": 6, "target_modules": [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]},
        {"r": 3, "lora_alpha": 40, "target_modules": ["in_proj_z", "in_proj_a", "down_proj"]},
    ],
    "GraniteMoeHybridForCausalLM-dense": [
        {"r": 5, "lora_alpha": 30, "target_modules": [*ATTENTION, "in_proj", "out_proj", "input_linear"]},
        {"r": 2, "lora_alpha": 50, "target_modules": ["in_proj", "output_linear"]},
    ],
    "GPTNeoXForCausalLM": [{"r": 6, "lora_alpha": 40, "target_modules": ["query_key_value", "dense"]}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _any_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT makes no adapter of Mamba's output, whose fast path in transformers would leave it out; others do. And takes
    what shared experts are called for experts' matrices, which transformers holds as one.
    """
    from peft.tuners import tuners_utils
    from peft.utils import transformers_weight_conversion

    monkeypatch.setattr(transformers_weight_conversion, "_convert_peft_config_moe", lambda *_: None)
    monkeypatch.setattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)


# On a GPU what a router chooses may be a matter of rounding: there all feed-forwards are dense.
ON_GPU: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {}, "Qwen3NextForCausalLM": {"mlp_only_layers": [0, 1, 2, 3, 4]}, "GPTNeoXForCausalLM": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in TARGETS), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_GPU)],
)
def test_each_row_gives_the_tokens_of_its_merged_model(name: str, device: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    base = tmp_path / "base"
    base.mkdir()
    save_random(name, base, **ON_GPU[name] if device == "cuda" else {})
    loras: list[LoRARequest | None] = [None]
    models = [load_base(base)]
    for number, settings in enumerate(TARGETS[name], 1):
        folder = make_adapter(base, tmp_path / str(number), number, **settings)
        loras.append(LoRARequest(f"adapter {number}", number, str(folder)))
        models.append(merged(base, folder))
    for _ in range(9):  # a random model may say the same whatever adapts it
        prompts = [[rng.randrange(3, 90) for _ in range(rng.choice([3, 17, 33]))] for _ in range(2)]
        expected = [greedy(model, prompt, 8) for prompt in prompts for model in models]
        if len(set(map(tuple, expected))) == len(expected):
            break
    assert len(set(map(tuple, expected))) == len(expected), "adapters have to be told apart by their tokens"
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    asked = [({"prompt_token_ids": prompt}, lora) for prompt in prompts for lora in loras]
    with LLM(str(base), **SIZES | {"device": device}) as llm:
        for _ in range(2):
            outputs = llm.generate([one for one, _ in asked], params, lora_request=[lora for _, lora in asked])
            assert [list(each.outputs[0].token_ids) for each in outputs] == expected
        llm.engine.scheduler.check()
        llm.engine.adapters.check()
    drafts = {"method": "suffix", "num_speculative_tokens": 4}
    with LLM(str(base), **SIZES | {"device": device}, speculative_config=drafts) as llm:
        decide_by_chance(llm.engine, rng)
        outputs = llm.generate([one for one, _ in asked], params, lora_request=[lora for _, lora in asked])
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected


def test_adapters_that_call_modules_as_checkpoints_do(tmp_path: Path) -> None:
    """What was trained with the publisher's own code names modules `backbone.…`."""
    save_random("NemotronHForCausalLM", tmp_path)
    folder = make_adapter(tmp_path, tmp_path / "new", 3, r=3, target_modules=["in_proj", "down_proj", "v_proj"])
    layout = AdapterLayout.of(build_spec(read_source(str(tmp_path))), embeddings=False)
    expected = read_adapter(str(folder), layout, max_rank=8, dtype=torch.float32)
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace(".model.layers.", ".backbone.layers."): each for name, each in load_file(file).items()}
    assert all(".backbone." in name for name in tensors)
    save_file(tensors, file)
    found = read_adapter(str(folder), layout, max_rank=8, dtype=torch.float32)
    assert torch.equal(torch.cat(found.pieces), torch.cat(expected.pieces))
    assert torch.equal(found.ranks, expected.ranks)
    assert any(bool(piece.any()) for piece in expected.pieces)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("NemotronHForCausalLM", "model.layers.0.mixer.conv1d"),
        ("Qwen3NextForCausalLM", "model.layers.1.mlp.shared_expert_gate"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(name: str, module: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    folder = make_adapter(tmp_path, tmp_path / "adapter", 1, r=2, target_modules=["o_proj"])
    file = folder / "adapter_model.safetensors"
    others = {f"base_model.model.{module}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(load_file(file) | others, file)
    layout = AdapterLayout.of(build_spec(read_source(str(tmp_path))), embeddings=False)
    with pytest.raises(ModelError, match=rf"{module}.* belongs to no module of this model that can be adapted"):
        read_adapter(str(folder), layout, max_rank=8, dtype=torch.float32)
