"""Mixtures whose checkpoints hold experts in NVFP4 or MXFP4, as ModelOpt and compressed-tensors write them: weights bit
for bit, logits and tokens of transformers on the values that are meant, parts of ranks, bytes, and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.weights.both_ways import assert_equals_transformers, save_both
from tests.runtime.weights.test_fp4_checkpoint import Quantized, compressed_config, modelopt_config, mxfp4, nvfp4
from tests.runtime.weights.test_integer_experts import COMMON, MODELS, is_quantized, load
from torch import Tensor

from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve, resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
# Rows of steps and of all short ones; blocks of 16 and of 32.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3MoeConfig", MODELS["qwen"][1] | {"hidden_size": 176, "moe_intermediate_size": 48}),
    "shared": ("Qwen2MoeConfig", MODELS["shared"][1] | {"hidden_size": 144, "moe_intermediate_size": 112}),
    "mixtral": MODELS["mixtral"],
    "deepseek": ("DeepseekV3Config", COMMON | {
        "hidden_size": 112, "intermediate_size": 80, "moe_intermediate_size": 48, "n_routed_experts": 6, "n_group": 3,
        "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 22, "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6, "v_head_dim": 9, "num_key_value_heads": 4, "head_dim": 6,
        "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.7,
    }),
}  # fmt: skip
LEFT = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
Way = tuple[str, dict[str, Any], Callable[[Tensor], Quantized]]
FORMATS: dict[str, Way] = {
    "modelopt-nvfp4": (
        "qwen", modelopt_config("NVFP4", group_size=16, exclude_modules=["lm_head", "model.layers.*.mlp.gate"]),
        lambda w: nvfp4(w, modelopt=True),
    ),
    "compressed-nvfp4": (
        "shared", compressed_config("nvfp4-pack-quantized", 16) | {"ignore": LEFT}, lambda w: nvfp4(w, modelopt=False)
    ),
    "compressed-mxfp4": ("mixtral", compressed_config("mxfp4-pack-quantized", 32), lambda w: mxfp4(w, "weight_packed")),
    "deepseek-nvfp4": (
        "deepseek", modelopt_config("NVFP4", group_size=16, exclude_modules=["lm_head", "*self_attn*"]),
        lambda w: nvfp4(w, modelopt=True),
    ),
}  # fmt: skip


def write(folder: Path, form: str) -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    import transformers

    kind, config, quantize = FORMATS[form]
    name, sizes = SIZES[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes)).float()
    generator = torch.Generator().manual_seed(len(form))
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in each else 0.1 * noise)
    model.save_pretrained(folder / "made")
    tensors = load_file(folder / "made" / "model.safetensors")
    packed = dict(tensors)
    for each in filter(is_quantized, tensors):
        if kind == "deepseek" and "self_attn" in each:
            continue
        parts, tensors[each] = quantize(packed.pop(each))
        packed |= {f"{each.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    settings = json.loads((folder / "made" / "config.json").read_text())
    return save_both(folder, settings, packed, config, tensors)


@pytest.mark.parametrize("form", FORMATS)
def test_experts_logits_and_tokens_are_those_of_the_values(form: str, tmp_path: Path, paged_model: Any) -> None:

    quantized, plain = write(tmp_path, form)
    seen = 0
    for ours, theirs in zip(load(quantized).layers, load(plain).layers, strict=True):
        if ours.mixture is None or theirs.mixture is None:
            continue
        of, exact = ours.mixture.experts, theirs.mixture.experts
        assert (of.kind, ours.mixture.router.kind) == (form.partition("-")[2], "dense")
        for expert in range(of.experts):
            for got, expected in zip(expert_values(of, expert), expert_values(exact, expert), strict=True):
                # One number of a matrix may be divided or multiplied by.
                torch.testing.assert_close(got, expected, rtol=2.5e-7, atol=0.0)
                seen += got.numel()
    assert seen
    method = FORMATS[form][1]["quant_method"]
    assert_equals_transformers(quantized, plain, method, form, paged_model)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("form", ["modelopt-nvfp4", "compressed-nvfp4", "compressed-mxfp4"])
def test_a_rank_s_experts_stand_for_its_part_of_the_whole_s(form: str, whole_experts: bool, tmp_path: Path) -> None:
    kind, config, _ = FORMATS[form]
    changes = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "num_experts": 5}
    SIZES["cut"] = (SIZES[kind][0], SIZES[kind][1] | {"head_dim": 32} | (changes if kind != "mixtral" else {}))
    FORMATS["cut"] = ("cut", config, FORMATS[form][2])
    quantized, _ = write(tmp_path, "cut")
    source = read_source(str(quantized))
    spec = build_spec(source)
    assert spec.moe is not None
    kept = resolve_quantization("auto", spec)
    whole = load_weights(source, spec, CPU, torch.float32, kept).layers[0].mixture
    assert whole is not None
    for place in (Place(rank, 2, 1, whole_experts) for rank in range(2)):
        cut = Cut(spec, place)
        assert cut.spec.moe is not None
        mine = load_weights(source, cut.spec, CPU, torch.float32, kept, cut=cut).layers[0].mixture
        assert mine is not None
        half = spec.moe.ffn // 2
        units = slice(None) if whole_experts else slice(place.tensor * half, (place.tensor + 1) * half)
        for expert, at in enumerate(cut.spec.moe.here):
            up, down = expert_values(mine.experts, expert)
            whole_up, whole_down = expert_values(whole.experts, at)
            assert torch.equal(up, torch.cat([each[units] for each in whole_up.chunk(2)]))
            assert torch.equal(down, whole_down[:, units])


def test_bytes_are_those_of_the_arena_and_a_published_shape_takes_its_bits(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "modelopt-nvfp4")
    spec = build_spec(read_source(str(quantized)))
    arena = WeightArena(spec, CPU, torch.bfloat16, "modelopt")
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", "modelopt")
    assert {place.kind for place in arena.experts.values()} == {"nvfp4"}
    published = build_spec(read_source("shape:qwen3-30b-a3b"))
    four = replace(published, checkpoint=spec.checkpoint)
    values = 48 * 128 * 3 * 768 * 2048
    others = sum(each.elements for each in four.parameters() if each.role == "linear")
    saved = published.parameter_bytes("bfloat16") - four.parameter_bytes("bfloat16", "modelopt")
    assert saved * 8 == pytest.approx((values + others) * (16 - 4.5), rel=4e-3)
    assert resolve(EngineConfig("m", quantization="auto"), four, "cuda").quantization == "modelopt"
    with pytest.raises(ConfigError, match=r"quantization is mxfp4, but the checkpoint's weights are NVFP4"):
        resolve(EngineConfig("m", quantization="mxfp4"), four, "cuda")


def test_random_weights_of_a_shape_rest_as_its_configuration_says(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "compressed-mxfp4")
    for folder in (quantized, write(tmp_path / "other", "deepseek-nvfp4")[0]):
        source = read_source(f"shape:{folder}")
        spec = build_spec(source)
        made = load_weights(source, spec, CPU, torch.bfloat16, resolve_quantization("auto", spec)).layers[1].mixture
        assert made is not None
        up, down = expert_values(made.experts, 2)
        assert 0.015 < up.std() < 0.025
        assert 0 < down.std() < up.std()


def bits(tensors: dict[str, Tensor], name: str) -> Tensor:
    return tensors[name].view(torch.uint8)[1]


@pytest.mark.parametrize(("form", "change", "message"), [
    ("modelopt-nvfp4", lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight_scale_2"),
     r"lacks tensor model.layers.0.mlp.experts.3.up_proj.weight_scale_2 .*NVFP4 by modelopt have weight \[48, 88\]"),
    ("modelopt-nvfp4", lambda t: bits(t, "model.layers.0.mlp.experts.5.down_proj.weight_scale").fill_(127),
     r"model.layers.0.mlp.experts.0.down_proj or an expert behind it has a scale that is no number"),
    ("compressed-nvfp4", lambda t: t["model.layers.1.mlp.experts.2.gate_proj.weight_global_scale"].fill_(float("inf")),
     r"model.layers.1.mlp.experts.2.gate_proj.weight_global_scale holds inf; a scale is finite and above zero"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_name(
    form: str, change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    quantized, _ = write(tmp_path, form)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(quantized)


@pytest.mark.parametrize(("form", "changes", "message"), [
    ("modelopt-nvfp4", {"moe_intermediate_size": 40}, "experts in NVFP4 are not .*rows have 40 columns, no .* of 16"),
    ("compressed-mxfp4", {"intermediate_size": 48}, "experts in MXFP4 are not .*rows have 48 columns, no .* of 32"),
])  # fmt: skip
def test_what_is_not_multiplied_is_refused_by_name(
    form: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantized, _ = write(tmp_path, form)
    settings = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ModelError, match=message):
        build_spec(read_source(str(quantized)))
