"""Checkpoints in integers, written as their makers write them (`integer_forms.py`): dequantized weights, tokens, and
errors that name the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.weights.both_ways import assert_likeliest, random_qwen3
from tests.runtime.weights.integer_forms import (
    AWQ_CONFIG,
    CPU,
    FORMATS,
    SHAPE,
    WIDE,
    WIDE_SHAPE,
    Quantized,
    awq,
    compressed_config,
    damaged,
    dense_value,
    gptq,
    gptq_config,
    load,
    write,
)
from torch import Tensor

from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import IntegerWeight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.weights.load import load_weights


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 8)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another, whose rows have whole groups of 128 columns."""
    return random_qwen3(tmp_path_factory.mktemp("wide"), WIDE_SHAPE, 5)


@pytest.mark.parametrize("form", FORMATS | WIDE)
def test_weights_are_those_of_the_definition_and_so_are_tokens(
    dense: Path, wide: Path, tmp_path: Path, form: str, paged_model: Any
) -> None:
    config, quantize = (FORMATS | WIDE)[form]
    quantized, plain = write(wide if form in WIDE else dense, tmp_path, config, quantize)
    ours, theirs = load(quantized), load(plain)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, IntegerWeight)
            assert torch.equal(dense_value(weight), getattr(expected, field).data), field
    prompts = [[5, 17, 80, 3, 44], [90, 1, 2, 2, 30, 31, 32, 60, 61]]
    tokens = paged_model(str(quantized), quantization=config["quant_method"], max_len=64).greedy(prompts, 24)
    assert_likeliest(plain, prompts, tokens)


LAYER = "model.layers.1.self_attn."


def shuffled(columns: int, group: int) -> Tensor:
    """An order of columns: the group of each, groups as large as they should be."""
    return (torch.randperm(columns) // group).int()


@pytest.mark.parametrize(("form", "change", "words_"), [
    ("awq", lambda t: t.pop(f"{LAYER}k_proj.qzeros"), r"lacks tensor model.layers.1.self_attn.k_proj.qzeros \[5, 10\]"),
    ("gptq", lambda t: t.update({f"{LAYER}q_proj.scales": torch.ones(5, 160).half()}), r"q_proj.scales is \[5, 160\]"),
    ("awq", lambda t: t.update({f"{LAYER}q_proj.qweight": torch.ones(160, 20)}), "qweight is F32; it must be I32"),
    ("gptq-act-order", lambda t: t[f"{LAYER}o_proj.g_idx"].fill_(1),
     "o_proj.g_idx puts columns into other groups than 5 of 32 each; .* by gptq is a permutation of these"),
    ("compressed-act-order", lambda t: t[f"{LAYER}o_proj.weight_g_idx"].add_(1),
     "o_proj.weight_g_idx puts columns into other groups than 5 of 32 each"),
    ("gptq", lambda t: t[f"{LAYER}o_proj.g_idx"].sub_(1), "o_proj.g_idx puts columns into other groups than 10 of 16"),
    ("gptq", lambda t: t.update({f"{LAYER}o_proj.g_idx": shuffled(160, 16)}),
     "o_proj.g_idx orders columns by activation, but quantization_config says that gptq did not; with desc_act true"),
    ("gptq-v2", lambda t: t.update({f"{LAYER}k_proj.g_idx": shuffled(160, 16)}), "k_proj.g_idx orders columns by act"),
    ("compressed", lambda t: t.update({f"{LAYER}o_proj.weight_g_idx": shuffled(160, 32)}),
     "o_proj.weight_g_idx orders columns by activation, .* says that compressed-tensors did not; with actorder group"),
    ("compressed-8", lambda t: t.update({f"{LAYER}o_proj.weight_g_idx": torch.zeros(80, dtype=torch.int32)}),
     r"o_proj.weight_g_idx is \[80\]; the configuration asks for \[160\]"),
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
    (gptq_config(32, dynamic={"+:.*down": {"bits": 3}}), "bits 3 is not supported; it must be 4 or 8"),
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


def test_an_order_that_is_none_may_be_there(dense: Path, tmp_path: Path) -> None:
    quantized, plain = write(dense, tmp_path, *FORMATS["compressed"])
    name, groups = f"{LAYER}o_proj.weight_g_idx", (torch.arange(160) // 32).int()
    ours = load(damaged(quantized, lambda tensors: tensors.update({name: groups}))).layers[1].output
    assert isinstance(ours, IntegerWeight)
    assert torch.equal(dense_value(ours), load(plain).layers[1].output.data)


@pytest.mark.parametrize(("config", "quantize"), [
    (AWQ_CONFIG | {"modules_to_not_convert": ["layers.0.mlp"]}, lambda w: awq(w, 32)),
    (gptq_config(16, modules_to_not_convert=["layers.0.mlp"]), lambda w: gptq(w, 16)),
    (gptq_config(16, dynamic={r"-:.*\.0\.mlp": {}}), lambda w: gptq(w, 16)),
])  # fmt: skip
def test_modules_that_are_left_alone_stay_dense(
    dense: Path, tmp_path: Path, config: dict[str, Any], quantize: Callable[[Tensor], Quantized]
) -> None:
    quantized, _ = write(dense, tmp_path, config, quantize)
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
