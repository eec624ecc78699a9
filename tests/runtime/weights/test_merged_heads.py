"""Quantized checkpoints whose Q, K and V lie together head by head, InternLM 2's and GPT-NeoX's: brought apart with
their scales, bit for bit as those of a dense checkpoint of the same values; and which quantized layouts are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.models.test_quantized_hybrid import FP8_CONFIG, fp8
from tests.runtime.models.test_zoo import ROWS, save_random
from tests.runtime.weights.both_ways import save_both
from tests.runtime.weights.integer_forms import AWQ_CONFIG, Quantized, awq, gptq, gptq_config
from tests.runtime.weights.test_fp4_checkpoint import modelopt_config, nvfp4
from tests.runtime.weights.test_integer_experts import load
from torch import Tensor

from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "awq": (AWQ_CONFIG | {"group_size": 8}, lambda w: awq(w, 8)),
    "gptq-act-order": (gptq_config(8, desc_act=True), lambda w: gptq(w, 8, act_order=True)),
    "nvfp4": (modelopt_config("NVFP4", group_size=16), lambda w: nvfp4(w, modelopt=True)),
    "fp8": (FP8_CONFIG, lambda w: fp8(w, "fp8_channel", "weight_scale")),
}
LINEARS = (
    "wqkv.weight", ".wo.weight", "w1.weight", "w2.weight", "w3.weight",
    "query_key_value.weight", "dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight",
)  # fmt: skip
SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "InternLM2ForCausalLM": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "GPTNeoXForCausalLM": {"num_attention_heads": 6, "num_key_value_heads": 6},
}


def write(folder: Path, name: str, form: str) -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    save_random(name, folder / "made")
    settings = json.loads((folder / "made" / "config.json").read_text()) | SIZES | MODELS[name]
    spec = build_spec(read_source(str(folder / "made")))
    generator, dense = torch.Generator().manual_seed(len(form)), {}
    heads, kv = settings["num_attention_heads"], settings["num_key_value_heads"]
    rows = {"wqkv": (heads + 2 * kv) * 16, "query_key_value": 3 * heads * 16, "wo": 96, "dense": 96, "w1": 64, "w3": 64,
            "w2": 96, "dense_h_to_4h": 64, "dense_4h_to_h": 96}  # fmt: skip
    for key, tensor in load_file(folder / "made" / "model.safetensors").items():
        module = key.split(".")[-2]
        wide = 64 if module in ("w2", "dense_4h_to_h") else 96
        first = rows.get(module, tensor.shape[0] if tensor.shape[0] == spec.vocab else 96)
        shape = (first,) if tensor.dim() == 1 else (first, wide)
        dense[key] = 0.1 * torch.randn(shape, generator=generator)
    config, quantize = FORMATS[form]
    packed = dict(dense)
    for key in [key for key in dense if key.endswith(LINEARS)]:
        parts, dense[key] = quantize(packed.pop(key))
        module = key.removesuffix(".weight")
        own_bias = f"{module}.bias" in packed
        for suffix, part in parts.items():
            if not (suffix == "bias" and own_bias):
                packed[f"{module}.{suffix}"] = part.contiguous()
    return save_both(folder, settings, packed, config, dense)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_brought_apart_with_their_scales(name: str, form: str, tmp_path: Path, paged_model: Any) -> None:
    quantized, plain = write(tmp_path, name, form)
    for ours, theirs in zip(load(quantized).layers, load(plain).layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight, exact = getattr(ours, field), getattr(theirs, field)
            assert getattr(weight, "kind", "packed") != "dense"
            torch.testing.assert_close(values_of(weight).float(), exact.data, rtol=1e-6, atol=0.0)
        assert (ours.qkv_bias is None) == (theirs.qkv_bias is None)
        assert ours.qkv_bias is None or torch.equal(ours.qkv_bias, theirs.qkv_bias)
    if form != "fp8":
        # As dense, which are those of transformers in the test of the table.
        ids = [5, 60, 17, 80, 33, 9, 71]
        got, wanted = (paged_model(str(each)).step([(0, ids)], all_logits=True)[0] for each in (quantized, plain))
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# Models whose heads have slopes, and those of their class that rotate, at sizes that fill words and groups.
SLOPED: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"n_head": 6, "hidden_size": 96},
    "MPTForCausalLM": {"n_heads": 6, "d_model": 96},
    "FalconForCausalLM": {"hidden_size": 64, "ffn_hidden_size": 96},
    "FalconForCausalLM-few-kv-heads": {"hidden_size": 64, "ffn_hidden_size": 96},
    "BaichuanForCausalLM-2-13b": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 64},
}
SLOPED_LINEARS = (
    "query_key_value.weight", ".dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight", "Wqkv.weight",
    "out_proj.weight", "W_pack.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
)  # fmt: skip


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "fp8"])
@pytest.mark.parametrize("name", SLOPED)
def test_quantized_models_with_slopes(name: str, form: str, tmp_path: Path, paged_model: Any) -> None:
    save_random(name, tmp_path / "made", **SLOPED[name])
    settings = json.loads((tmp_path / "made" / "config.json").read_text())
    config, quantize = FORMATS[form]
    dense = load_file(tmp_path / "made" / "model.safetensors")
    packed = {key: tensor for key, tensor in dense.items() if not key.endswith(SLOPED_LINEARS)}
    for key in dense.keys() - packed.keys():
        parts, dense[key] = quantize(dense[key])
        module = key.removesuffix(".weight")
        packed |= {f"{module}.{name}": each.contiguous() for name, each in parts.items() if name != "bias"}
    quantized, plain = save_both(tmp_path, settings, packed, config, dense)
    layers = load(quantized).layers
    for ours, theirs in zip(layers, load(plain).layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight, exact = getattr(ours, field), getattr(theirs, field)
            assert getattr(weight, "kind", "packed") != "dense"
            torch.testing.assert_close(values_of(weight).float(), exact.data, rtol=1e-6, atol=0.0)
    if form != "fp8":
        ids = [5, 60, 17, 80, 33, 9, 71]
        got, wanted = (paged_model(str(each)).step([(0, ids)], all_logits=True)[0] for each in (quantized, plain))
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


# What docs/features.md says of quantized checkpoints: by columns, in one stack, or in turn.
REFUSED = (
    "GPT2LMHeadModel", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GptOssForCausalLM",
    "Phi3SmallForCausalLM",
)  # fmt: skip


def quantized_config(name: str, form: str, folder: Path) -> Path:
    save_random(name, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": FORMATS[form][0]}))
    return folder


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_lie_row_by_row_is_refused(name: str, form: str, tmp_path: Path) -> None:
    words = f"quantization_config: checkpoints of {name} .* not supported, .* row by row; serve the .* in 16 bits"
    with pytest.raises(ModelError, match=words) as found:
        build_spec(read_source(str(quantized_config(name, form, tmp_path))))
    assert found.value.param == "quantization_config"


@pytest.mark.matrix(take=8)
@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith(REFUSED)])
def test_nothing_else_is_refused(name: str, tmp_path: Path) -> None:
    assert build_spec(read_source(str(quantized_config(name, "fp8", tmp_path)))).checkpoint is not None
