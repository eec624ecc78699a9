"""Mixtures of experts cut into ranks, as files hold them: each rank has its units of every expert, or some experts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.weights.integer_forms import AWQ_CONFIG, awq, compressed, compressed_config
from tests.runtime.weights.test_integer_experts import INT8_CONFIG
from torch import Tensor

from stoker_kernels.moe import ExpertWeights
from stoker_kernels.quant import quantize_int8, quantize_weight
from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.checkpoint.read_entry import SMALL_GAP, read_entry
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import MixtureWeights
from stoker_runtime.models.quantization.integer_checkpoint import read_gptq
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
EXPERTS, HIDDEN, FFN = 5, 128, 256
COMMON: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "moe_intermediate_size": FFN,
    "intermediate_size": 96,
}  # fmt: skip
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": EXPERTS, "intermediate_size": FFN,
    "attention_bias": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], experts: dict[str, Tensor]) -> str:
    """A random model of one layer with these tensors of experts, under their last names."""
    q, kv, layer = 4 * 32, 2 * 32, "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, HIDDEN), "self_attn.k_proj.weight": (kv, HIDDEN),
        "self_attn.v_proj.weight": (kv, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, q),
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    if config["architectures"] != GPT_OSS["architectures"]:
        shapes |= {"self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,)}
        shapes |= {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    else:
        shapes |= {"mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.bias": (EXPERTS,), "self_attn.sinks": (4,)}
    tensors = {f"{layer}{name}": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"{layer}mlp.experts.{name}": tensor for name, tensor in experts.items()}
    for name, rows in (("model.embed_tokens", 70), ("lm_head", 70)):
        tensors[f"{name}.weight"] = torch.randn(rows, HIDDEN)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def fp8(folder: Path, form: str) -> str:
    """A checkpoint whose experts are in FP8."""
    kinds = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
    found: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            weight = quantize_weight(torch.randn(shape), kinds[form])  # type: ignore[arg-type]
            assert weight.scale is not None
            scale = weight.scale.reshape(()) if form == "tensor" else weight.scale
            found |= {f"{expert}.{name}_proj.weight": weight.data, f"{expert}.{name}_proj.weight_scale": scale}
    block = {"weight_block_size": [128, 128]} if form == "block" else {}
    ignored = ["re:.*self_attn.*", "lm_head"]
    quantized = {"quantization_config": {"quant_method": "fp8", "ignored_layers": ignored, **block}}
    return write(folder, QWEN | quantized, found)


def int8(folder: Path) -> str:
    """A checkpoint whose experts are in INT8, as their activations are."""
    found: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            data, scale = quantize_int8(torch.randn(shape))
            found |= {f"{expert}.{name}_proj.weight": data, f"{expert}.{name}_proj.weight_scale": scale}
    config = INT8_CONFIG | {"ignore": ["re:.*self_attn.*", "lm_head"]}
    return write(folder, QWEN | {"quantization_config": config}, found)


def integers(folder: Path, form: str) -> str:
    """A checkpoint whose experts are in integers of four bits, or of eight."""
    bits = 8 if form == "compressed-8" else 4
    config = AWQ_CONFIG if form == "awq" else compressed_config(32, bits, zeros=True)
    found: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            weight = torch.randn(shape)
            parts, _ = awq(weight, 32) if form == "awq" else compressed(weight, 32, bits, zeros=True)
            found |= {f"{expert}.{name}_proj.{suffix}": part.contiguous() for suffix, part in parts.items()}
    left_out = {"modules_to_not_convert": ["self_attn"]} if form == "awq" else {"ignore": ["re:.*self_attn.*"]}
    return write(folder, QWEN | {"quantization_config": config | left_out}, found)


def mxfp4(folder: Path) -> str:
    """A checkpoint whose experts are in four bits, as gpt-oss has them."""

    def packed(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def exponents(*shape: int) -> Tensor:
        return torch.randint(118, 130, shape, dtype=torch.uint8)

    return write(folder, GPT_OSS, {
        "gate_up_proj_blocks": packed(EXPERTS, 2 * FFN, HIDDEN // 32, 16),
        "gate_up_proj_scales": exponents(EXPERTS, 2 * FFN, HIDDEN // 32),
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * FFN),
        "down_proj_blocks": packed(EXPERTS, HIDDEN, FFN // 32, 16),
        "down_proj_scales": exponents(EXPERTS, HIDDEN, FFN // 32),
        "down_proj_bias": torch.randn(EXPERTS, HIDDEN),
    })  # fmt: skip


def stacked(folder: Path, form: str) -> str:
    """A checkpoint whose experts are one tensor: turned, as Qwen3-VL's are published, or as transformers saves them."""
    both, down = torch.randn(EXPERTS, 2 * FFN, HIDDEN), torch.randn(EXPERTS, HIDDEN, FFN)
    found = {"gate_up_proj": both, "down_proj": down}
    if form == "turned":
        found = {name: tensor.mT.contiguous() for name, tensor in found.items()}
    return write(folder, QWEN | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, found)


def loaded(model: str, place: Place | None = None) -> MixtureWeights:
    source = read_source(model)
    whole = build_spec(source)
    cut = Cut(whole, place) if place else None
    kept = resolve_quantization("auto", whole)
    weights = load_weights(source, cut.spec if cut else whole, CPU, torch.float32, kept, cut=cut)
    mixture = weights.layers[0].mixture
    assert mixture is not None
    return mixture


def values(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of all experts as numbers, `[E, …]`."""
    both, down = zip(*(expert_values(weights, expert) for expert in range(weights.experts)), strict=True)
    gate, up = torch.stack(both).chunk(2, 1)
    return gate, up, torch.stack(down)


def quantized(folder: Path, form: str) -> str:
    if form in ("turned", "saved"):
        return stacked(folder, form)
    if form in ("mxfp4", "int8"):
        return mxfp4(folder) if form == "mxfp4" else int8(folder)
    return integers(folder, form) if form in ("awq", "compressed", "compressed-8") else fp8(folder, form)


def test_quantized_experts_of_a_model_that_sees_are_tensors_of_their_own(tmp_path: Path) -> None:
    plain = loaded(model := fp8(tmp_path / "m", "block"))
    config = Path(model) / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"))
    for ours, theirs in zip(values(loaded(model).experts), values(plain.experts), strict=True):
        assert torch.equal(ours, theirs)


FORMS = ["tensor", "channel", "block", "mxfp4", "awq", "compressed", "compressed-8", "int8", "turned", "saved"]


def test_stacked_experts_are_the_same_turned_or_not(tmp_path: Path) -> None:
    for form in ("turned", "saved"):
        torch.manual_seed(5)
        both = loaded(stacked(tmp_path / form, form)).experts.gate_up
        torch.manual_seed(5)
        assert torch.equal(both, torch.randn(EXPERTS, 2 * FFN, HIDDEN))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_each_rank_reads_its_experts_alone(
    form: str, whole_experts: bool, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    """Of five the first rank has three, or its half of each."""
    model = quantized(tmp_path / "m", form)
    loaded(model)
    size, each = bytes_read(), []
    for place in places(2, 1, whole_experts=whole_experts):
        loaded(model, place)
        each.append(bytes_read())
    assert 0.95 * size < sum(each) < 1.15 * size, (each, size)
    assert max(each) < (0.68 if whole_experts else 0.58) * size, (each, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_s_experts_stand_for_its_part_of_the_whole_s(form: str, whole_experts: bool, tmp_path: Path) -> None:
    model = quantized(tmp_path / "m", form)
    whole = loaded(model)
    gate, up, down = values(whole.experts)
    for place in places(2, 1, whole_experts=whole_experts):
        mine = loaded(model, place)
        assert torch.equal(mine.router.data, whole.router.data)
        experts = slice(*((0, 3), (3, 5))[place.tensor]) if whole_experts else slice(0, EXPERTS)
        units = slice(0, FFN) if whole_experts else slice(place.tensor * FFN // 2, (place.tensor + 1) * FFN // 2)
        own = values(mine.experts)
        for part, theirs in zip(own, (gate[:, units], up[:, units], down[..., units]), strict=True):
            assert torch.equal(part, theirs[experts])
        if form == "mxfp4":
            bias = whole.experts.gate_up_bias
            assert bias is not None
            assert mine.experts.gate_up_bias is not None
            theirs = bias.view(EXPERTS, 2, FFN)[experts, :, units]
            assert torch.equal(mine.experts.gate_up_bias.view(theirs.shape), theirs)
            # Added once for each expert, or the sum over ranks would have it several times.
            assert (mine.experts.down_bias is None) == (not whole_experts and place.tensor > 0)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b"])
def test_ranks_hold_what_a_mixture_holds_and_no_more(shape: str, whole_experts: bool) -> None:
    spec = build_spec(read_source(f"shape:{shape}"))
    tensors = random.choice([2, 4])
    parts = [split_spec(spec, place) for place in places(tensors, 2, whole_experts=whole_experts)]
    held = sum(part.parameter_bytes("bfloat16") for part in parts)
    # Routers and norms are on every rank.
    assert spec.parameter_bytes("bfloat16") <= held <= spec.parameter_bytes("bfloat16") * 1.01
    read = sum(part.active_bytes("bfloat16") for part in parts)
    assert read == pytest.approx(spec.active_bytes("bfloat16"), rel=0.02)
    assert len({part.part.step_parameters for part in parts if part.part}) == 1


def mixture_of(**changes: Any) -> ModelSpec:
    spec = build_spec(read_source("shape:qwen3-30b-a3b"))
    assert spec.moe is not None
    # Of an architecture whose experts may share one.
    return replace(spec, architecture="Glm4MoeForCausalLM", moe=replace(spec.moe, **changes))


def in_rows_of(**changes: Any) -> ModelSpec:
    """Integers of four bits with a scale a row, which may be cut anywhere but within a block."""
    checkpoint = read_gptq("m", {"bits": 4, "group_size": -1})
    return replace(mixture_of(**changes), checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("spec", "tensors", "whole_experts", "message"),
    [
        (mixture_of(ffn=769), 2, False, "experts' width is 769 .--enable-expert-parallel"),
        (mixture_of(shared_ffn=33), 2, True, "shared expert's width is 33; sizes that work for this model: 1"),
        (mixture_of(packing="mxfp4", ffn=720), 4, False, "cut at 180, within their blocks of 32"),
        (in_rows_of(ffn=704), 4, False, "experts_down would be cut at 176, within its blocks of 32"),
        (mixture_of(experts=3), 4, True, "4 ranks cannot share 3 experts"),
        (build_spec(read_source("shape:qwen2.5-7b")), 2, True, "the model has no experts"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(spec: ModelSpec, tensors: int, whole_experts: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_spec(spec, Place(0, tensors, 1, whole_experts))


def test_whole_experts_need_ranks_to_share_them() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size, which is 1"):
        EngineConfig(model="shape:tiny", enable_expert_parallel=True).validate()


@pytest.mark.parametrize("gap", [0, 3, SMALL_GAP, SMALL_GAP + 1])
def test_runs_of_bytes_are_read_end_to_end_from_anywhere(gap: int, tmp_path: Path) -> None:
    rng = random.Random(gap)
    run, count, first = rng.randrange(5, 300), rng.randrange(9, 80), rng.randrange(20)
    stride = run + gap
    data = rng.randbytes(first + (count - 1) * stride + run)
    file = tmp_path / "bytes"
    file.write_bytes(data)
    entry = TensorEntry("x", (count, run), file, first, count * run, "U8", stride=stride, runs=((0, run),))
    expected = b"".join(data[first + row * stride :][:run] for row in range(count))
    with file.open("rb") as opened:
        for _ in range(20):
            start = rng.randrange(len(expected))
            found = bytearray(rng.randrange(1, len(expected) - start + 1))
            read_entry(opened.fileno(), entry, start, memoryview(found))
            assert found == expected[start : start + len(found)]
        file.write_bytes(data[:-1])
        with pytest.raises(ModelError, match="while 1 more were due"):
            read_entry(opened.fileno(), entry, 0, memoryview(bytearray(len(expected))))
