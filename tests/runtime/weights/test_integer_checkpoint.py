"""Checkpoints in integers, written as their makers write them: dequantized weights, tokens, and errors that name the
tensor.

AWQ and GPTQ files are packed here word by word after their definitions; compressed-tensors' by the library itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.weights.both_ways import random_qwen3, save_both
from torch import Tensor

from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import IntegerWeight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 160, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 40, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip
Quantized = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by suffix, and the value [N, K] that they stand for."""


def integers(weight: Tensor, bits: int, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales [N, G] fp16 and zero points [N, G] of a weight, rounded to nearest."""
    n, k = weight.shape
    cut = weight.view(n, -1, group or k)
    most = (1 << bits) - 1
    if zeros:
        low, high = cut.amin(-1).clamp_max(0), cut.amax(-1).clamp_min(0)
        scale = ((high - low) / most).half()
        zero = (-low / scale.float()).round().clamp(1, most).int()
    else:
        scale = (cut.abs().amax(-1) / (most // 2)).half()
        zero = torch.full_like(scale, (most + 1) // 2, dtype=torch.int32)
    codes = (cut / scale.float().unsqueeze(-1)).round().add(zero.unsqueeze(-1)).clamp(0, most)
    return codes.view(n, k).int(), scale, zero


def value(codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    """(code - zero) · scale, the group of each column given."""
    return (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words(codes: Tensor, bits: int, places: tuple[int, ...]) -> Tensor:
    """Neighbours of the last dimension packed into int32: the one at `places[i]` of each lot stands at bit i · bits."""
    lots = codes.long().view(*codes.shape[:-1], -1, len(places))
    packed = sum(lots[..., place] << (bits * i) for i, place in enumerate(places))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def awq(weight: Tensor, group: int) -> Quantized:
    codes, scale, zero = integers(weight, 4, group, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    groups = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    packed = {"qweight": words(codes.t(), 4, order), "qzeros": words(zero.t(), 4, order), "scales": scale.t()}
    return packed, value(codes, scale, zero, groups)


def gptq(
    weight: Tensor, group: int, bits: int = 4, *, zeros: bool = True, act_order: bool = False, v2: bool = False,
    seed: int = 0,
) -> Quantized:  # fmt: skip
    n, k = weight.shape
    drawn = torch.randperm(k, generator=torch.Generator().manual_seed(seed or k))
    permutation = drawn if act_order else torch.arange(k)
    codes, scale, zero = integers(weight[:, permutation], bits, group, zeros)
    groups = torch.empty(k, dtype=torch.int64)
    groups[permutation] = torch.arange(k) // (group or k)
    back = torch.empty_like(codes)
    back[:, permutation] = codes
    places = tuple(range(32 // bits))
    stored = zero.t() if v2 else zero.t() - 1
    packed = {
        "qweight": words(back, bits, places).t(), "qzeros": words(stored, bits, places), "scales": scale.t(),
        "g_idx": groups.int(), "bias": torch.zeros(n).half(),
    }  # fmt: skip
    return packed, value(back, scale, zero, groups)


def compressed(weight: Tensor, group: int, bits: int = 4, *, zeros: bool = False) -> Quantized:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes, scale, zero = integers(weight, bits, group, zeros)
    half = 1 << (bits - 1)
    packed = {
        "weight_packed": pack_to_int32((codes - half).to(torch.int8), bits),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        packed["weight_zero_point"] = pack_to_int32((zero - half).to(torch.int8), bits, packed_dim=0)
    groups = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    return packed, value(codes, scale.bfloat16(), zero, groups)


def compressed_config(group: int, bits: int = 4, *, zeros: bool = False, **changes: object) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group" if group else "channel",
        "group_size": group or None, "actorder": None, "dynamic": False,
    }  # fmt: skip
    lot = {"targets": ["Linear"], "weights": weights | changes, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": lot},
        "ignore": ["lm_head"],
    }  # fmt: skip


def gptq_config(group: int, bits: int = 4, **changes: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": False} | changes


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "awq": (AWQ_CONFIG, lambda w: awq(w, 32)),
    "awq-column": (AWQ_CONFIG | {"group_size": -1, "modules_to_not_convert": None}, lambda w: awq(w, 0)),
    "gptq": (gptq_config(16), lambda w: gptq(w, 16)),
    "gptq-symmetric": (gptq_config(32, sym=True), lambda w: gptq(w, 32, zeros=False)),
    "gptq-8": (gptq_config(32, 8), lambda w: gptq(w, 32, 8)),
    "gptq-act-order": (gptq_config(32, desc_act=True), lambda w: gptq(w, 32, act_order=True)),
    "gptq-static-groups": (gptq_config(32, desc_act=True, static_groups=True), lambda w: gptq(w, 32)),
    "gptq-v2": (gptq_config(16, checkpoint_format="gptq_v2"), lambda w: gptq(w, 16, v2=True)),
    "gptq-column": (gptq_config(0), lambda w: gptq(w, 0)),
    "compressed": (compressed_config(32), lambda w: compressed(w, 32)),
    "compressed-8": (compressed_config(32, 8), lambda w: compressed(w, 32, 8)),
    "compressed-channel": (compressed_config(0), lambda w: compressed(w, 0)),
    "compressed-zeros": (compressed_config(16, zeros=True), lambda w: compressed(w, 16, zeros=True)),
}
Written = tuple[Path, Path]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 8)


def write(dense: Path, folder: Path, config: dict[str, Any], quantize: Callable[[Tensor], Quantized]) -> Written:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    tensors = load_file(dense / "model.safetensors")
    packed, plain = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = plain[name] = tensor
            continue
        parts, plain[name] = quantize(tensor)
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    settings = json.loads((dense / "config.json").read_text())
    return save_both(folder, settings, packed, config, plain)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    source = read_source(str(folder))
    spec = build_spec(source)
    quantization = resolve(EngineConfig(model=str(folder)), spec, "cpu").quantization
    return load_weights(source, spec, CPU, dtype, quantization)


def dense_value(weight: IntegerWeight) -> Tensor:
    """The weight with its columns in the order of x."""
    found = dequantize_integers(weight, torch.float32)
    if weight.order is None:
        return found
    back = torch.empty_like(found)
    back[:, weight.order.long()] = found
    return back


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_definition(dense: Path, tmp_path: Path, form: str) -> None:
    quantized, plain = write(dense, tmp_path, *FORMATS[form])
    ours, theirs = load(quantized), load(plain)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, IntegerWeight)
            assert torch.equal(dense_value(weight), getattr(expected, field).data), field


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "gptq-8", "compressed-zeros"])
def test_tokens_are_those_of_transformers_on_the_dequantized_weights(
    dense: Path, tmp_path: Path, form: str, paged_model: Any
) -> None:
    import transformers

    quantized, plain = write(dense, tmp_path, *FORMATS[form])
    prompts = [[5, 17, 80, 3, 44], [90, 1, 2, 2, 30, 31, 32, 60, 61]]
    method = FORMATS[form][0]["quant_method"]
    ours = paged_model(str(quantized), quantization=method, max_len=128).greedy(prompts, 64)
    model = transformers.Qwen3ForCausalLM.from_pretrained(plain)
    model.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, ours, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()


def damaged(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


LAYER = "model.layers.1.self_attn."


@pytest.mark.parametrize(("form", "change", "words_"), [
    ("awq", lambda t: t.pop(f"{LAYER}k_proj.qzeros"), r"lacks tensor model.layers.1.self_attn.k_proj.qzeros \[5, 10\]"),
    ("gptq", lambda t: t.update({f"{LAYER}q_proj.scales": torch.ones(5, 160).half()}), r"q_proj.scales is \[5, 160\]"),
    ("awq", lambda t: t.update({f"{LAYER}q_proj.qweight": torch.ones(160, 20)}), "qweight is F32; it must be I32"),
    ("gptq-act-order", lambda t: t[f"{LAYER}o_proj.g_idx"].fill_(1), "o_proj puts columns into other groups than 32"),
    ("gptq-act-order", lambda t: t.update({f"{LAYER}v_proj.g_idx": t[f"{LAYER}v_proj.g_idx"].flip(0).contiguous()}),
     "q_proj and model.layers.1.self_attn.v_proj are one matrix here, but their g_idx differ"),
    ("gptq", lambda t: t[f"{LAYER}q_proj.bias"].fill_(0.5), "q_proj.bias has no place"),
    ("compressed", lambda t: t.update({f"{LAYER}q_proj.weight_extra": torch.ones(1)}), "weight_extra has no place"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_name_before_memory_is_taken(
    dense: Path,
    tmp_path: Path,
    form: str,
    change: Callable[[dict[str, Tensor]], None],
    words_: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized, _ = write(dense, tmp_path, *FORMATS[form])
    monkeypatch.setattr("stoker_runtime.weights.load.WeightArena", None)
    with pytest.raises(ModelError, match=words_):
        load(damaged(quantized, change))


@pytest.mark.parametrize(("config", "words_"), [
    (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv' is not supported; it must be gemm"),
    (AWQ_CONFIG | {"bits": 3}, "bits 3 is not supported; it must be 4 or 8"),
    (AWQ_CONFIG | {"group_size": "many"}, "group_size 'many'"),
    (gptq_config(32, lm_head=True), "lm_head True"),
    (gptq_config(32, dynamic={"+:.*down": {"bits": 8}}), "dynamic"),
    (gptq_config(32, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    (compressed_config(32, strategy="tensor"), "weights.strategy 'tensor'"),
    (compressed_config(32) | {"format": "int-quantized"}, "format 'int-quantized'"),
    ({"quant_method": "aqlm"}, "'aqlm' are not supported; known are fp8, fbgemm_fp8, compressed-tensors, awq, gptq"),
])  # fmt: skip
def test_a_setting_that_is_not_supported_is_named(
    dense: Path, tmp_path: Path, config: dict[str, Any], words_: str
) -> None:
    quantized, _ = write(dense, tmp_path, config, lambda w: awq(w, 32))
    with pytest.raises(ModelError, match=words_):
        build_spec(read_source(str(quantized)))


def test_a_wrong_group_size_names_the_tensor(dense: Path, tmp_path: Path) -> None:
    quantized, _ = write(dense, tmp_path, AWQ_CONFIG | {"group_size": 80}, lambda w: awq(w, 32))
    with pytest.raises(ModelError, match=r"qzeros is \[5, \d+\]; the configuration asks for \[2, \d+\]"):
        load(quantized)


def test_modules_that_are_left_alone_stay_dense(dense: Path, tmp_path: Path) -> None:
    config = AWQ_CONFIG | {"modules_to_not_convert": ["layers.0.mlp"]}
    quantized, _ = write(dense, tmp_path, config, lambda w: awq(w, 32))
    plain = load_file(dense / "model.safetensors")

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.mlp.")]:
            tensors.pop(name)
        tensors |= {name: tensor for name, tensor in plain.items() if name.startswith("model.layers.0.mlp.")}

    weights = load(damaged(quantized, restore))
    assert [layer.gate_up.kind for layer in weights.layers] == ["dense", "int4"]
    assert torch.equal(weights.layers[0].down.data, plain["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("asked", "works"), [("awq", True), ("auto", True), ("gptq", False), ("w4", False), ("none", False)]
)
def test_quantization_names_what_the_checkpoint_is(dense: Path, tmp_path: Path, asked: str, works: bool) -> None:
    quantized, plain = write(dense, tmp_path, *FORMATS["awq"])
    spec = build_spec(read_source(str(quantized)))
    if works:
        assert resolve(EngineConfig(model=str(quantized), quantization=asked), spec, "cuda").quantization == "awq"
        assert resolve(EngineConfig(model=str(quantized)), spec, "cuda").dtype == "bfloat16"
    else:
        with pytest.raises(
            ConfigError, match=f"quantization is {asked}, but the checkpoint's weights are integers of 4"
        ):
            resolve(EngineConfig(model=str(quantized), quantization=asked), spec, "cuda")
    with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
        resolve(EngineConfig(model=str(plain), quantization="gptq"), build_spec(read_source(str(plain))), "cuda")


def test_four_bits_at_load_stay_within_half_a_step(dense: Path) -> None:
    source = read_source(str(dense))
    spec = build_spec(source)
    ours, plain = load_weights(source, spec, CPU, torch.float32, "w4"), load_weights(source, spec, CPU, torch.float32)
    for layer, expected in zip(ours.layers, plain.layers, strict=True):
        weight = layer.down
        assert isinstance(weight, IntegerWeight)
        assert (weight.bits, weight.group) == (4, 128)
        step = weight.scale.t()[:, torch.arange(weight.in_features) // weight.group]
        assert ((dequantize_integers(weight, torch.float32) - expected.down.data).abs() <= 0.502 * step).all()
