"""From configuration to spec: what each architecture reads, and what is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ARCHITECTURES, build_spec
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.parameter import ALIGNMENT
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.models.spec import ModelSpec, QkNorm
from stoker_runtime.text.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def _spec(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    return build_spec(ModelSource("m", SourceKind.FOLDER, Path("m"), config, generation or {}))


def test_defaults_of_a_short_configuration() -> None:
    spec = _spec(num_key_value_heads=None, max_position_embeddings=None)
    assert (spec.kv_heads, spec.head_dim, spec.max_position) == (4, 16, 2048)
    assert (spec.eps, spec.activation, spec.dtype) == (1e-6, "silu", "float32")
    flags = (spec.tie_embeddings, spec.qkv_bias, spec.output_bias, spec.ffn_bias, spec.qk_norm)
    assert flags == (False, False, False, False, QkNorm.NONE)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (0,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (0,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (0, 0, 8, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 8, 0, 8),
        ),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert _spec(architectures=[architecture], **changes).windows == windows


def test_mistral_without_a_window_says_so_with_null() -> None:
    source = ModelSource(
        "m",
        SourceKind.FOLDER,
        Path("m"),
        CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    )
    assert build_spec(source).windows == (0,) * 4


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("LlamaForCausalLM", (True, True, False)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, True)),
    ],
)
def test_biases_and_norms_of_heads(architecture: str, flags: tuple[bool, bool, bool]) -> None:
    spec = _spec(architectures=[architecture], attention_bias=True)
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm is QkNorm.HEAD) == flags


def test_a_window_of_a_text_model_that_does_not_say_is_its_kind_s() -> None:
    sees = {"architectures": ["Mistral3ForConditionalGeneration"]}
    assert _spec(**sees, text_config={}).windows == (4096,) * 4
    assert _spec(**sees, text_config={"sliding_window": None}).windows == (0,) * 4
    assert _spec(**sees, text_config={"sliding_window": 27}).windows == (27,) * 4


def test_minimax_rotates_a_part_of_each_head_by_either_name() -> None:
    minimax: dict[str, Any] = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 40}
    assert _spec(**minimax, rotary_dim=26).rope.dim == 26
    assert _spec(**minimax, rope_parameters={"partial_rotary_factor": 0.35}).rope.dim == 14


def test_layers_that_predict_further_tokens_may_stand_behind_the_last() -> None:
    found = _spec(architectures=["MiniMaxM2ForCausalLM"], num_mtp_modules=3, mtp_transformer_layers=2)
    assert found.draft_layers == 6


def test_end_tokens_are_the_union_of_both_files() -> None:
    assert _spec({"eos_token_id": [7, 9]}, eos_token_id=5).eos_token_ids == (5, 7, 9)
    assert _spec({"eos_token_id": 5}, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert _spec().eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(key: str) -> None:
    assert _spec(**{key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausallm"]},
            r"Causallm is not supported. The nearest is LlamaForCausalLM. .*stoker_runtime/models/architectures",
        ),
        (
            {"architectures": ["Llama4ForConditionalGeneration"]},
            "Llama4For.* is not supported: .* within chunks.* The nearest is .*stoker_runtime/models/architectures",
        ),
        *(({"architectures": ["Phi3SmallForCausalLM"], "ff_intermediate_size": 40, "hidden_act": "gegelu"} | more, text)
          for more, text in [
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"blocksparse_block_size": 48}, "blocksparse_block_size is 48"),
            ({"blocksparse_num_local_blocks": 0}, "num_local_blocks is 0"),
            ({"blocksparse_vert_stride": 0}, "vert_stride 0"),
        ]),
        *(({"architectures": ["MPTForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2} | more, text)
          for more, text in [
            ({"attn_config": {"clip_qkv": 6}}, "clip_qkv is 6"),
            ({"attn_config": {"alibi": False}}, "alibi is False"),
            ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type is 'multiquery_attention'"),
            ({"no_bias": False}, "no_bias is False"),
        ]),
        (
            {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        *(({"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"rope_type": "yarn"} | more}, text)
          for more, text in [
            ({"original_max_position_embeddings": 40}, "lacks 'llama_4_scaling_beta'"),
            ({"llama_4_scaling_beta": 0.2}, "lacks 'original_max_position_embeddings'"),
        ]),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}},
            "text_config.model_type 'mistral4' is not supported; it must be mistral or ministral3",
        ),
        *(({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 24} | more, text) for more, text in [
            ({"use_bias": True}, "use_bias is True"),
            ({"moe_gate": "top2_fused"}, "moe_gate is 'top2_fused'"),
            ({"moe_use_aux_free": False}, "moe_use_aux_free is False"),
            ({"moe_norm_min": 0.2}, "moe_norm_min is 0.2"),
        ]),
        *(({"architectures": ["MiniMaxM2ForCausalLM"]} | more, text) for more, text in [
            ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
            ({"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
            ({"use_routing_bias": False}, "use_routing_bias is False"),
            ({"shared_intermediate_size": 48}, "shared_intermediate_size is 48"),
            ({"attn_type_list": [1, 1, 0, 1]}, "attn_type_list is 0"),
        ]),
        ({"architectures": ["Dots1ForCausalLM"], "moe_intermediate_size": 24, "scoring_func": "softmax"},
         "scoring_func is 'softmax'"),
        *(({"architectures": ["HunYuanDenseV1ForCausalLM"]} | more, text) for more, text in [
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaling 'dynamic' .* with an alpha"),
            ({"use_cla": True}, "use_cla is True"),
        ]),
        *(({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": kinds}, "mlp_layer_types is not supported")
          for kinds in (["sparse", "dense", "sparse", "sparse"], ["dense", "sparse"], ["dense", "mixed"] * 2)),
        (
            {"architectures": ["GPTJForCausalLM"], "n_embd": 48, "n_head": 3, "n_layer": 2, "rotary_dim": 0},
            "rotary_dim is 0",
        ),
        ({"architectures": []}, "Supported are"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_size": "wide"}, "not usable"),
        ({"quantization_config": {"quant_method": "quip"}}, "'quip'"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["x"],
            },
            "layer type 'x'",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            "1 entries for 4 layers",
        ),
        ({"partial_rotary_factor": 0.2}, "rotary dimensions do not fit"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _spec(**changes)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_build(name: str) -> None:
    spec = build_spec(read_source(f"shape:{name}"))
    assert spec.architecture in ARCHITECTURES
    assert spec.eos_token_ids


def test_bytes_of_a_known_model() -> None:
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    # 7,615,616,512 parameters, published; padding adds little, and nothing here is off by a layer.
    values = sum(parameter.elements for parameter in spec.parameters())
    assert values == 7_615_616_512
    assert 2 * values <= spec.parameter_bytes("bfloat16") <= 2 * values + 400 * ALIGNMENT
    assert spec.kv_bytes_per_token("bfloat16") == 2 * 28 * 4 * 128 * 2
    assert spec.kv_bytes_per_token("fp8") == 28 * 4 * 128 * 2
    embeddings = 2 * 152064 * 3584
    linears = 28 * (3584 * (3584 + 1024) + 3584 * 3584 + 3 * 3584 * 18944)
    assert 0.99 < spec.parameter_bytes("bfloat16", "fp8") / (2 * embeddings + linears) < 1.01


def test_tied_embeddings_count_once() -> None:
    spec = build_spec(read_source("shape:qwen3-0.6b"))
    untied = replace(spec, tie_embeddings=False)
    assert untied.parameter_bytes("bfloat16") - spec.parameter_bytes("bfloat16") == 2 * 151936 * 1024


def test_sources_that_name_nothing(tmp_path: Path) -> None:
    for model, message in [
        ("shape:huge", "unknown shape; the shapes are qwen2.5-7b"),
        (str(tmp_path / "absent"), "no such folder"),
        (str(tmp_path), "no config.json"),
    ]:
        with pytest.raises(ModelError, match=message):
            read_source(model)


def test_a_folder_is_a_shape_too(tmp_path: Path) -> None:
    drawn = {"hidden_size": 8 * random.randrange(3, 99), "vocab_size": random.randrange(300, 999)}
    config = SHAPES["qwen3-0.6b"] | drawn
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = read_source(f"shape:{tmp_path}")
    assert (source.kind, source.path) == (SourceKind.SHAPE, None)
    assert build_spec(source).hidden == config["hidden_size"]
    assert Tokenizer.load(f"shape:{tmp_path}").vocab_size == config["vocab_size"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"there is no config\.json in this folder"):
        read_source(f"shape:{tmp_path}")


def test_a_folder_of_gguf_files_says_which(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"holds a\.gguf: name the file"):
        read_source(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_source(str(tmp_path))


def test_generation_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert build_spec(read_source(str(tmp_path))).eos_token_ids == (3,)


def test_specs_need_no_torch(tiny_checkpoint: Callable[[str], Path]) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from stoker_runtime.models.architectures import build_spec;"
        "from stoker_runtime.models.config_source import read_source;"
        f"build_spec(read_source({str(tiny_checkpoint('qwen3'))!r})).parameter_bytes('bfloat16');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
