"""Mixtures whose checkpoints hold experts in integers of four or eight bits, and those that get them at load: weights
bit for bit, logits and tokens of transformers on the values that are meant, bytes, and what is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.weights.both_ways import assert_equals_transformers, save_both
from tests.runtime.weights.integer_forms import (
    AWQ_CONFIG,
    Quantized,
    awq,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
)
from torch import Tensor

from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import GIB, activation_bytes, resolve, resolve_quantization, workspace_bytes
from stoker_runtime.executor.state import state_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.layers import mixture
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
# Rows of a step and short ones, of gate and up as of down.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3MoeConfig", COMMON | {
        "hidden_size": 288, "moe_intermediate_size": 160, "num_experts": 6, "norm_topk_prob": True,
        "intermediate_size": 96, "mlp_only_layers": [1],
    }),
    "mixtral": ("MixtralConfig", COMMON | {"hidden_size": 160, "intermediate_size": 320, "num_local_experts": 3}),
    "shared": ("Qwen2MoeConfig", COMMON | {
        "hidden_size": 160, "moe_intermediate_size": 96, "num_experts": 5, "shared_expert_intermediate_size": 64,
        "intermediate_size": 96,
    }),
}  # fmt: skip
Way = tuple[str, dict[str, Any], Callable[[Tensor], Quantized]]
INT8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
    }},
}  # fmt: skip


def ordered(weight: Tensor, bits: int = 4) -> Quantized:
    """Columns in an order of each expert's own; those of what is one matrix here have one order."""
    expert = 320 in weight.shape
    return gptq(weight, 32, bits, act_order=True, seed=int(1e4 * weight.abs().sum()) if expert else 0)


FORMATS: dict[str, Way] = {
    "gptq-act-order": ("mixtral", gptq_config(32, desc_act=True), ordered),
    "gptq-act-order-8": ("mixtral", gptq_config(32, 8, desc_act=True), lambda w: ordered(w, 8)),
    "awq": ("mixtral", AWQ_CONFIG | {"modules_to_not_convert": ["gate"]}, lambda w: awq(w, 32)),
    "gptq-symmetric": ("qwen", gptq_config(32, sym=True), lambda w: gptq(w, 32, zeros=False)),
    "gptq-zeros": ("shared", gptq_config(32, dynamic={r"-:.*\.shared_expert_gate$": {}}), lambda w: gptq(w, 32)),
    "gptq-rows": ("mixtral", gptq_config(0), lambda w: gptq(w, 0)),
    "gptq-8": ("mixtral", gptq_config(32, 8), lambda w: gptq(w, 32, 8)),
    "gptq-8-symmetric": ("qwen", gptq_config(0, 8, sym=True), lambda w: gptq(w, 0, 8, zeros=False)),
    "compressed-8": ("shared", compressed_config(32, 8), lambda w: compressed(w, 32, 8)),
    "compressed-8-rows": ("qwen", compressed_config(0, 8), lambda w: compressed(w, 0, 8)),
    "compressed": ("qwen", compressed_config(32), lambda w: compressed(w, 32)),
    "compressed-zeros": ("shared", compressed_config(32, zeros=True), lambda w: compressed(w, 32, zeros=True)),
}


def made(kind: str, folder: Path) -> Path:
    """A random mixture in fp32."""
    import transformers

    name, sizes = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes)).float()
    generator = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in parameter_name else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def is_quantized(name: str) -> bool:
    """Linear layers, but neither routers nor gates of shared experts, nor embedding and head."""
    linear = name.endswith((".w1.weight", ".w2.weight", ".w3.weight", "_proj.weight"))
    return linear and "norm" not in name


def write(folder: Path, way: Way) -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    kind, config, quantize = way
    dense = made(kind, folder / "made")
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    tensors = load_file(dense / "model.safetensors")
    for name in filter(is_quantized, tensors):
        parts, plain[name] = quantize(tensors[name])
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    # Biases of the model's own stand in for GPTQ's zeros.
    others = {name: tensor for name, tensor in tensors.items() if not is_quantized(name)}
    packed, plain = packed | others, plain | others
    settings = json.loads((dense / "config.json").read_text())
    return save_both(folder, settings, packed, config, plain)


def load(folder: Path, asked: str = "auto", dtype: torch.dtype = torch.float32) -> DecoderWeights:
    source = read_source(str(folder))
    spec = build_spec(source)
    return load_weights(source, spec, CPU, dtype, resolve_quantization(asked, spec))


def kind_of(form: str) -> str:
    return "dense" if "order" in form else "int8" if "-8" in form else "int4"


@pytest.mark.parametrize("form", FORMATS)
def test_experts_are_those_of_the_definition(tmp_path: Path, form: str) -> None:
    quantized, plain = write(tmp_path, FORMATS[form])
    for ours, theirs in zip(load(quantized).layers, load(plain).layers, strict=True):
        if ours.mixture is None or theirs.mixture is None:
            assert FORMATS[form][0] == "qwen"
            continue
        assert ours.mixture.experts.kind == kind_of(form)
        assert ours.mixture.router.kind == "dense"
        for expert in range(ours.mixture.experts.experts):
            for got, expected in zip(
                expert_values(ours.mixture.experts, expert), expert_values(theirs.mixture.experts, expert), strict=True
            ):
                assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "form", ["awq", "gptq-symmetric", "gptq-zeros", "compressed-zeros", "gptq-8", "compressed-8-rows", "gptq-act-order"]
)
def test_logits_and_tokens_are_those_of_transformers(tmp_path: Path, form: str, paged_model: Any) -> None:

    quantized, plain = write(tmp_path, FORMATS[form])
    method = FORMATS[form][1]["quant_method"]
    assert_equals_transformers(quantized, plain, method, form, paged_model)


@pytest.mark.parametrize("kind", MODELS)
def test_experts_rounded_at_load_stay_within_half_a_step(kind: str, tmp_path: Path, paged_model: Any) -> None:
    folder = made(kind, tmp_path)
    ours, plain = load(folder, "w4"), load(folder)
    for layer, exact in zip(ours.layers, plain.layers, strict=True):
        if layer.mixture is None or exact.mixture is None:
            continue
        of = layer.mixture.experts
        assert (of.kind, of.group) == ("int4", 128)
        assert of.down_scale is not None
        for expert in range(of.experts):
            got, wanted = expert_values(of, expert)[1], expert_values(exact.mixture.experts, expert)[1]
            step = of.down_scale[expert, torch.arange(of.ffn) // 128, :, 0].t()
            assert ((got - wanted).abs() <= 0.502 * step).all()
    ids = random.Random(kind).choices(range(3, 104), k=30)
    spec = build_spec(read_source(str(folder)))
    got = paged_model(str(folder), quantization="w4").step([(0, ids)], all_logits=True)[0]
    torch.testing.assert_close(got, reference_logits(spec, ours, ids, 0), atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_bytes_are_those_of_the_arena(kind: str, tmp_path: Path) -> None:
    spec = build_spec(read_source(str(made(kind, tmp_path))))
    for dtype in (torch.bfloat16, torch.float32):
        arena = WeightArena(spec, CPU, dtype, "w4")
        assert arena.num_bytes == spec.parameter_bytes(str(dtype).removeprefix("torch."), "w4")
        assert len(arena.experts) == 2 * len(spec.moe.layers if spec.moe else ())


def test_a_published_shape_takes_four_bits_and_a_quarter() -> None:
    spec = build_spec(read_source("shape:qwen3-30b-a3b"))
    values = 48 * 128 * 3 * 768 * 2048
    saved = spec.parameter_bytes("bfloat16") - spec.parameter_bytes("bfloat16", "w4")
    others = sum(each.elements for each in spec.parameters() if each.role == "linear")
    assert saved * 8 == pytest.approx(values * (16 - 4.25) + others * (16 - 4 - 24 / 128), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "quantization", "tokens", "gib"),
    [
        # Of 128 experts each token has 8; gate and up are 1,536 × 2,048.
        ("qwen3-30b-a3b", "w4", 8192, 128 * 1536 * 2048 * 2 / GIB),
        ("qwen3-30b-a3b", "w4", 2048, 0.0),
        ("qwen3-30b-a3b", "fp8", 8192, 0.0),
        ("gpt-oss-20b", "auto", 8192, 32 * 5760 * 2880 * 2 / GIB),
        ("gpt-oss-20b", "none", 8192, 0.0),
    ],
)
def test_hopper_has_room_for_experts_that_become_bf16(
    shape: str, quantization: str, tokens: int, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For steps of so many tokens, beyond what these leave of the workspace; others have none, nor do fixed sums."""
    spec = build_spec(read_source(f"shape:{shape}"))
    asked = EngineConfig(model="m", quantization=quantization, max_num_batched_tokens=tokens, dtype="bfloat16")
    config = resolve(asked, spec, "cuda")
    fixed = replace(config, batch_invariant=True)
    before, before_fixed = state_bytes(config, spec), state_bytes(fixed, spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mixture, "sm_of", lambda _: 90)
    left = workspace_bytes(config, spec) - activation_bytes(config, spec, tokens)
    assert state_bytes(config, spec) - before == (round(gib * GIB) - left if gib else 0)
    assert state_bytes(fixed, spec) == before_fixed
    monkeypatch.setattr(mixture, "sm_of", lambda _: 89)
    assert state_bytes(config, spec) == before


def test_no_step_has_memory_for_a_stack_in_16_bits() -> None:
    spec = build_spec(read_source("shape:qwen3-30b-a3b"))
    plain, packed = (
        activation_bytes(resolve(EngineConfig(model="m", quantization=way), spec, "cuda"), spec, 8192)
        for way in ("none", "w4")
    )
    # Of the largest other matrix, Q, K and V.
    assert packed - plain == 2 * (32 + 2 * 4) * 128 * 2048


def int8(weight: Tensor) -> Quantized:
    """127 steps to either side of zero, a scale a row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    data = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


@pytest.mark.parametrize("kind", ["qwen", "shared"])
def test_experts_and_what_they_read_in_eight_bits(
    kind: str, tmp_path: Path, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights bit for bit; logits of transformers, whose products read what 255 steps a token can tell."""
    import transformers

    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
    quantized, plain = write(tmp_path, (kind, INT8_CONFIG | {"ignore": ignore}, int8))
    ours, theirs = load(quantized), load(plain)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        if layer.mixture is None or expected.mixture is None:
            continue
        assert layer.mixture.experts.kind == "int8_channel"
        for expert in range(layer.mixture.experts.experts):
            for got, wanted in zip(
                expert_values(layer.mixture.experts, expert), expert_values(expected.mixture.experts, expert),
                strict=True,
            ):  # fmt: skip
                assert torch.equal(got, wanted)
    ids = random.Random(kind).choices(range(3, 104), k=40)
    got = paged_model(str(quantized), quantization="compressed-tensors", max_len=128).step([(0, ids)], all_logits=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, experts_implementation="eager")
    unrounded, linear = {104, 1, 5, 6}, torch.nn.functional.linear

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Heads, routers and gates read all that there is.
        if weight.shape[0] not in unrounded:
            step = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            x = (x / step).round() * step
        return linear(x, weight, bias)

    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0]
        monkeypatch.setattr(torch.nn.functional, "linear", rounding)
        rounded = model(torch.tensor([ids])).logits[0]
    # On the border between two steps a number may fall on either side.
    assert 0 < (got[0] - rounded).norm() < 0.25 * (rounded - exact).norm()


def test_a_byte_a_code_is_what_eight_bits_take(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, FORMATS["gptq-8"])
    spec = build_spec(read_source(str(quantized)))
    arena = WeightArena(spec, CPU, torch.bfloat16, resolve_quantization("auto", spec))
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", "gptq")
    # A byte a code, and for 32 of them a scale and a zero point of two bytes each.
    held = sum(each.data.nbytes + each.scale.nbytes for each in arena.experts.values())
    assert held == 2 * 3 * 3 * 320 * 160 * 36 / 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ_CONFIG | {"group_size": 16}, "groups have 16 columns, no whole blocks of 32"),
        (gptq_config(32, dynamic={r"+:.*\.1\..*": {"bits": 8}}),
         "experts.0.w1 in integers of 4 bits in groups of 32, .*experts.1.w1 in integers of 8 bits in groups of 32; "
         "supported is one scheme for all of its parts"),
        (gptq_config(32, dynamic={r"+:.*layers\.1\..*w2$": {"group_size": 64}}),
         "layers.1.experts_gate_up is in integers of 4 bits in groups of 32 and layers.1.experts_down in integers of 4 "
         "bits in groups of 64, but the experts of a layer are multiplied in one scheme"),
        (gptq_config(32, dynamic={r"-:.*w2$": {}}), "experts_down in 16 bits"),
    ],
)
def test_what_is_not_multiplied_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = made("mixtral", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelError, match=message):
        build_spec(read_source(str(folder)))


def test_experts_with_an_order_of_their_own_are_widened_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = write(tmp_path, FORMATS["gptq-act-order"])
    spec = build_spec(read_source(str(quantized)))
    arena = WeightArena(spec, CPU, torch.bfloat16, resolve_quantization("auto", spec))
    # Known before memory is taken.
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", "gptq")
    assert sum(each.nbytes for name, each in arena.dense.items() if "experts" in name) == 2 * 2 * 3 * 3 * 320 * 160
    assert {weight.order is not None for weight in arena.integers.values()} == {True}
    with caplog.at_level("WARNING"):
        load(quantized, dtype=torch.bfloat16)
    assert "experts in 4 bits become bfloat16, of 4 times the memory" in caplog.text
    tensors = load_file(quantized / "model.safetensors")
    name = next(name for name in tensors if "experts.1.w2.g_idx" in name)
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.1\.w2\.g_idx puts columns into other groups"):
        load(quantized)


def test_widths_that_fill_no_block_are_refused_at_load(tmp_path: Path) -> None:
    spec = build_spec(read_source(str(made("mixtral", tmp_path))))
    assert spec.moe is not None
    odd = replace(spec, moe=replace(spec.moe, ffn=328))
    with pytest.raises(ConfigError, match="quantization is w4, but of experts rows have 328 columns, no whole blocks"):
        resolve(EngineConfig(model="m", quantization="w4"), odd, "cpu")
    assert resolve(EngineConfig(model="m", isq="w4"), spec, "cpu").quantization == "w4"


def test_a_layer_that_is_left_alone_keeps_its_experts_dense(tmp_path: Path) -> None:
    config = FORMATS["gptq-rows"][1] | {"dynamic": {r"-:model\.layers\.1\..*": {}}}
    quantized, _ = write(tmp_path, ("mixtral", config, FORMATS["gptq-rows"][2]))
    plain, tensors = load_file(tmp_path / "made" / "model.safetensors"), load_file(quantized / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if "layers.1." not in name}
    tensors |= {name: each for name, each in plain.items() if "layers.1." in name}
    save_file(tensors, quantized / "model.safetensors")
    kinds = [layer.mixture.experts.kind for layer in load(quantized).layers if layer.mixture]
    assert kinds == ["int4", "dense"]
