"""Mixtures of experts: their checkpoints in every form, what they weigh, what they count, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models.greedy import assert_greedy, assert_logits
from tests.runtime.models.test_zoo import ROWS, save_random
from torch import Tensor

from stoker_kernels.moe import Routes, experts
from stoker_kernels.quant import LinearWeight, quantize_weight
from stoker_runtime.bench.reference import mixture as reference_mixture
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import activation_bytes, resolve, resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.parameter import ITEM_BYTES, Role
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]

QWEN: dict[str, Any] = {
    "vocab_size": 110,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-MoE, whose experts are as wide as a block of scales."""
    import transformers

    folder = tmp_path_factory.mktemp("qwen")
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**QWEN)).float()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in name else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def changed(folder: Path, to: Path, edit: Callable[[Tensors, dict[str, Any]], Tensors]) -> Path:
    """A copy of a checkpoint with other tensors and another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    tensors = edit(load_file(to / "model.safetensors"), config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


def prompt(vocab: int, length: int = 43) -> list[int]:
    return random.Random(length).choices(range(3, vocab), k=length)


@pytest.mark.parametrize(
    "name", ["Qwen2MoeForCausalLM", "PhimoeForCausalLM-long", "Glm4MoeForCausalLM", "GptOssForCausalLM"]
)
def test_the_benchmark_s_reference_is_the_model(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path)
    spec = build_spec(read_source(str(tmp_path)))
    weights = load_weights(str(tmp_path), spec, CPU, torch.float32)
    ids = prompt(spec.vocab)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, 5:]
    torch.testing.assert_close(reference_logits(spec, weights, ids, 5), expected, atol=3e-4, rtol=3e-4)
    assert name in ROWS


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path, paged_model: Any) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # A row of gate and up is a step and a short one, of down three short ones.
    sizes = {"hidden_size": 288, "intermediate_size": 224, "num_local_experts": 3, "num_hidden_layers": 2}
    ROWS["packed"] = ROWS["GptOssForCausalLM"].__class__("GptOssConfig", lambda rng: {
        **sizes, "num_experts_per_tok": 2, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2,
        "sliding_window": 8,
    })  # fmt: skip
    theirs = save_random("packed", tmp_path / "plain")
    del ROWS["packed"]
    generator = torch.Generator().manual_seed(8)

    def pack(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        found = dict(tensors)
        for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
            count, columns, rows = found.pop(name).shape
            blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 125, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            theirs.get_parameter(name).data.copy_(values)
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
        return found

    packed = changed(tmp_path / "plain", tmp_path / "packed", pack)
    spec = build_spec(read_source(str(packed)))
    ids = prompt(spec.vocab)
    kept = load_weights(str(packed), spec, CPU, torch.float32, resolve_quantization("auto", spec))
    assert kept.layers[0].mixture is not None
    assert kept.layers[0].mixture.experts.kind == "mxfp4"
    for weights in (kept, load_weights(str(packed), spec, CPU, torch.float32, resolve_quantization("none", spec))):
        assert_logits(reference_logits(spec, weights, ids, 0), theirs, ids, 2e-4)
    ours = paged_model(str(packed), quantization="mxfp4")
    assert_logits(ours.step([(0, ids)], all_logits=True)[0], theirs, ids, 2e-4)
    ours.forget()
    assert_greedy(ours.greedy([ids], 64)[0], theirs, ids, 2e-4)

    def without_scales(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts.down_proj_sc" not in name}

    def too_large(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][2, 5, 1] = 161
        return tensors

    def of_words(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        name = "model.layers.0.mlp.experts.down_proj_blocks"
        return tensors | {name: tensors[name].to(torch.int16)}

    for edit, message in (
        (without_scales, r"lacks tensor model\.layers\.1\.mlp\.experts\.down_proj_scales"),
        (too_large, r"layers\.1\.mlp\.experts\.gate_up_proj_scales, expert 2, has a scale of 2\^34"),
        (of_words, r"layers\.0\.mlp\.experts\.down_proj_blocks is I16; it must be U8"),
    ):
        broken = changed(packed, tmp_path / edit.__name__, edit)
        with pytest.raises(ModelError, match=message):
            load_weights(str(broken), spec, CPU, torch.float32, "mxfp4")


def test_experts_in_mxfp4_take_their_bits_and_are_named() -> None:
    spec = build_spec(read_source("shape:gpt-oss-20b"))
    assert spec.moe is not None
    names = [each.name for each in spec.parameters() if each.role is Role.EXPERTS]
    sizes = {way: spec.parameter_bytes("bfloat16", way) for way in ("none", "mxfp4")}
    weights = 24 * 32 * 3 * 2880 * 2880
    # A row's last 64 columns have eight bytes of scales, too, where two would do.
    assert len(names) == 48
    assert (sizes["none"] - sizes["mxfp4"]) * 8 / weights == pytest.approx(16 - 4.25 - 8 * 6 / 2880, abs=1e-4)
    small = replace(spec, num_layers=1, windows=(0,), moe=replace(spec.moe, layers=frozenset({0}), experts=2, ffn=96))
    small = replace(small, hidden=160, heads=2, kv_heads=1, vocab=50)
    arena = WeightArena(small, CPU, torch.bfloat16, "mxfp4")
    assert arena.num_bytes == small.parameter_bytes("bfloat16", "mxfp4")
    assert {tuple(each.data.shape) for each in arena.experts.values()} == {(2, 192, 80), (2, 160, 48)}
    assert [resolve_quantization(each, spec) for each in ("auto", "mxfp4", "none", "fp8")] == [
        "mxfp4", "mxfp4", "none", "fp8",
    ]  # fmt: skip
    for asked in ("w4", "awq", "gguf"):
        with pytest.raises(ConfigError, match=f"quantization is {asked}, but the checkpoint's experts are in MXFP4"):
            resolve_quantization(asked, spec)
    with pytest.raises(ConfigError, match="quantization is mxfp4, but the checkpoint is not quantized"):
        resolve_quantization("mxfp4", build_spec(read_source("shape:qwen3-30b-a3b")))


@pytest.mark.parametrize("form", ["tensor", "channel", "block"])
def test_experts_of_an_fp8_checkpoint_are_its_own(form: str, qwen: Path, tmp_path: Path, paged_model: Any) -> None:
    kinds = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
    made: dict[str, LinearWeight] = {}

    def quantize(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") and "layers.1.mlp" not in name and "self_attn" not in name:
                made[name] = weight = quantize_weight(tensor, kinds[form])  # type: ignore[arg-type]
                assert weight.scale is not None
                found[name] = weight.data
                found[f"{name}_scale"] = weight.scale.reshape(()) if form == "tensor" else weight.scale
        block = {"weight_block_size": [128, 128]} if form == "block" else {}
        ignored = ["re:.*self_attn.*", "re:model.layers.1.mlp.*", "lm_head"]
        config["quantization_config"] = {"quant_method": "fp8", "ignored_layers": ignored, **block}
        return found

    folder = changed(qwen, tmp_path / form, quantize)
    spec = build_spec(read_source(str(folder)))
    weights = load_weights(str(folder), spec, CPU, torch.float32)
    mixture = weights.layers[2].mixture
    assert mixture is not None
    assert weights.layers[1].mixture is None
    assert mixture.experts.kind == ("fp8_block" if form == "block" else "fp8_channel")
    for expert in range(5):
        down = made[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"]
        gate = made[f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"]
        assert torch.equal(mixture.experts.down[expert].float(), down.data.float())
        assert torch.equal(mixture.experts.gate_up[expert, :256].float(), gate.data.float())
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(29)).bfloat16().float()
    got = experts(x, Routes(torch.full((6, 1), 4, dtype=torch.int32), torch.ones(6, 1)), mixture.experts)
    assert spec.moe is not None
    defined = reference_mixture._expert(spec.moe, mixture.experts, 4, x)
    # The inner values are rounded to 16 bits there: some fall on the other side of an edge between two e4m3 numbers.
    assert (got - defined).norm() < 0.04 * defined.norm()
    ids = prompt(spec.vocab)
    exact = paged_model(str(qwen)).step([(0, ids)], all_logits=True)[0]
    near = paged_model(str(folder)).step([(0, ids)], all_logits=True)[0]
    assert 0.001 < (near - exact).norm() / exact.norm() < 0.25


def test_quantized_at_load_is_what_was_quantized_expert_by_expert(qwen: Path) -> None:
    spec = build_spec(read_source(str(qwen)))
    weights = load_weights(str(qwen), spec, CPU, torch.float32, "fp8")
    mixture = weights.layers[0].mixture
    assert mixture is not None
    assert mixture.experts.kind == "fp8_channel"
    tensors = load_file(qwen / "model.safetensors")
    for expert in (0, 4):
        expected = quantize_weight(tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"], "fp8_channel")
        assert expected.scale is not None
        assert mixture.experts.gate_up_scale is not None
        assert torch.equal(mixture.experts.gate_up[expert, 256:].float(), expected.data.float())
        assert torch.equal(mixture.experts.gate_up_scale[expert, 256:, None], expected.scale)
    assert mixture.router.kind == "dense"


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_bytes_are_those_of_the_arena(quantization: str, qwen: Path) -> None:
    spec = build_spec(read_source(str(qwen)))
    arena = WeightArena(spec, CPU, torch.bfloat16, quantization)
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", quantization)
    embedding = 110 * 128 * 2
    fewer = arena.num_bytes - embedding - spec.active_bytes("bfloat16", quantization)
    values = 2 * 3 * 5 * 256 * 128  # of gate, up and down of five experts in two layers
    idle = values * 3 / 5 * (1 if quantization == "fp8" else 2)
    scales = 2 * 5 * (512 + 128) * 4 * 3 / 5 if quantization == "fp8" else 0
    assert fewer == pytest.approx(idle + scales, abs=2000)  # alignment


def test_a_published_shape_has_as_many_parameters_as_its_name_says() -> None:
    for name, total, active in (("qwen3-30b-a3b", 30.5, 3.04), ("gpt-oss-20b", 20.9, 3.61)):
        spec = build_spec(read_source(f"shape:{name}"))
        assert spec.parameter_bytes("bfloat16") / ITEM_BYTES["bfloat16"] / 1e9 == pytest.approx(total, abs=0.1)
        assert spec.active_bytes("bfloat16") / ITEM_BYTES["bfloat16"] / 1e9 == pytest.approx(active, abs=0.02), name


def test_a_step_s_memory_counts_each_token_s_experts(qwen: Path) -> None:
    spec = build_spec(read_source(str(qwen)))
    config = resolve(EngineConfig(model=str(qwen), dtype="bfloat16"), spec, "cpu")
    grown = activation_bytes(config, spec, 100) - activation_bytes(config, spec, 0)
    assert grown >= 100 * 2 * 2 * (256 + 128)  # of two experts the inner values and the rows, in 16 bits


def test_padding_is_counted_by_no_expert(qwen: Path, paged_model: Any) -> None:
    model = paged_model(str(qwen))
    model.step([(0, prompt(110, 9)), (1, prompt(110, 4))])
    mixture = model.decoder.mixture
    assert mixture.counts.sum(1).tolist() == [26, 0, 4]  # of the last layer only the sampled rows
    inputs = model._inputs([(0, [5]), (1, [6])], False)
    slots = inputs.slot_mapping.clone()
    slots[1] = -1
    model.decoder.forward(replace(inputs, slot_mapping=slots), model._kv)
    assert mixture.counts.sum(1).tolist() == [2, 0, 2]


def test_layers_that_only_draft_are_left_out(qwen: Path, tmp_path: Path) -> None:
    glm = tmp_path / "glm"
    save_random("Glm4MoeForCausalLM", glm)

    def draft(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["num_nextn_predict_layers"] = 1
        config.pop("num_mtp_layers", None)
        return tensors | {"model.layers.4.eh_proj.weight": torch.zeros(3, 3)}

    folder = changed(glm, tmp_path / "draft", draft)
    load_weights(str(folder), build_spec(read_source(str(folder))), CPU, torch.float32)
    strange = changed(glm, tmp_path / "strange", lambda tensors, _: tensors | {"model.layers.4.x": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"model\.layers\.4\.x has no place"):
        load_weights(str(strange), build_spec(read_source(str(strange))), CPU, torch.float32)


def test_what_cannot_be_served_is_refused_by_name(qwen: Path, tmp_path: Path) -> None:
    spec = build_spec(read_source(str(qwen)))
    with pytest.raises(ConfigError, match="isq is q8_0, but experts"):
        resolve(EngineConfig(model=str(qwen), isq="q8_0"), spec, "cpu")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 48, "zero_point": True, "version": "gemm"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"quantization_config": awq}, "groups have 48 columns"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"num_experts_per_tok": 6}, "6 of 5 experts"),
        ({"hidden_act": "gelu"}, "experts with hidden_act 'gelu'"),
    ]
    for number, (settings, message) in enumerate(cases):

        def set_(tensors: Tensors, config: dict[str, Any], new: dict[str, Any] = settings) -> Tensors:
            config.update(new)
            return tensors

        folder = changed(qwen, tmp_path / str(number), set_)
        with pytest.raises(ModelError, match=message):
            build_spec(read_source(str(folder)))

    def without_one(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        return {name: each for name, each in tensors.items() if "layers.2.mlp.experts.3.up" not in name}

    folder = changed(qwen, tmp_path / "short", without_one)
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"):
        load_weights(str(folder), spec, CPU, torch.float32)
