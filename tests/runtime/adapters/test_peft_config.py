"""What an adapter_config.json may say, matched against PEFT's own reading of it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.adapters.peft_config import CONFIG, read_peft_config
from stoker_runtime.errors import ModelError

MODULES = [
    f"model.layers.{layer}.{room}.{name}_proj"
    for layer in range(12)
    for room, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
]
ALL = ["model.embed_tokens", *MODULES, "lm_head"]


def write(folder: Path, **values: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **values}))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["v_proj", "mlp.down_proj", "lm_head"]},
        {"target_modules": r"model\.layers\.(1|10|11)\..*_proj"},
        {"target_modules": ["up_proj", "o_proj"], "layers_to_transform": 10},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 11], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.3.mlp.up_proj"]},
        {"target_modules": ["k_proj"], "exclude_modules": r".*\.[0-4]\..*"},
        {"target_modules": ["model.layers.4.self_attn.q_proj"], "layers_to_transform": [9]},
    ],
)
def test_modules_are_matched_as_peft_matches_them(settings: dict[str, Any], tmp_path: Path) -> None:
    import peft
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    theirs = peft.LoraConfig(**settings)
    found = {module: check_target_module_exists(theirs, module) for module in ALL}
    expected = [module for module, hit in found.items() if hit and not isinstance(hit, _ExcludedModule)]
    assert expected
    assert read_peft_config(write(tmp_path, **settings)).targets(ALL, "lm_head") == expected


def test_all_linear_is_neither_embedding_nor_head(tmp_path: Path) -> None:
    assert read_peft_config(write(tmp_path, target_modules="all-linear")).targets(ALL, "lm_head") == MODULES


def test_ranks_and_scales_by_pattern(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"up_proj": 3, r"layers\.1\..*": 5}, "alpha_pattern": {"self_attn.q_proj": 20}}
    config = read_peft_config(write(tmp_path, lora_alpha=10, **patterns))
    assert [config.rank_of(MODULES[at]) for at in (0, 5, 7, 12, 70)] == [8, 3, 5, 3, 8]
    assert config.scale_of("model.layers.2.self_attn.q_proj") == 20 / 8
    assert config.scale_of("model.layers.2.mlp.up_proj") == 10 / 3
    assert read_peft_config(write(tmp_path, lora_alpha=10, use_rslora=True)).scale_of("x") == 10 / 8**0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is true"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 0}, "r is 0"),
        ({"r": 257}, "ranks from 1 to 256"),
        ({"rank_pattern": {"q_proj": 300}}, "r is 300"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": None}, "not usable"),
    ],
)
def test_what_would_compute_something_else_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        read_peft_config(write(tmp_path, **settings))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder of a PEFT adapter"):
        read_peft_config(tmp_path)
    (tmp_path / CONFIG).write_text("[1")
    with pytest.raises(ModelError, match="cannot be read"):
        read_peft_config(tmp_path)
