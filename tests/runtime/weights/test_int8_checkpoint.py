"""Checkpoints in INT8 with activations in INT8, as compressed-tensors writes them: integers, tokens, refusals.

The oracle is transformers on the dequantized weights, what each linear reads rounded to 255 steps a token before.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.weights.integer_forms import damaged, load, write
from tests.runtime.weights.test_fp4_checkpoint import dense
from torch import Tensor

from stoker_kernels.quant import Int8Weight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import activation_bytes, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

__all__ = ["dense"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(inputs: dict[str, Any] | None = None, form: str = "int-quantized", **changes: object) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "actorder": None} | changes
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    lot = {"targets": ["Linear"], "weights": weights, "input_activations": activations | (inputs or {})}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": lot}, "ignore": ["lm_head"],
    }  # fmt: skip


def quantized(weight: Tensor, *, whole: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """A scale a row, or one for the `whole` matrix."""
    largest = weight.abs().amax().view(1) if whole else weight.abs().amax(1, keepdim=True)
    scale = (largest / 127).bfloat16()
    data = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


def rounded(_: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """What a linear reads, as 127 steps to either side of zero a token can tell it."""
    step = given[0].abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return ((given[0] / step).round() * step,)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_integers_are_the_file_s_and_tokens_those_of_rounded_activations(
    dense: Path, tmp_path: Path, strategy: str, paged_model: Any
) -> None:
    import transformers

    quantize = partial(quantized, whole=strategy == "tensor")
    folder, plain = write(dense, tmp_path, config(strategy=strategy), quantize)
    ours, theirs = load(folder), load(plain)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, Int8Weight)
            assert torch.equal(weight.data.float() * weight.scale, getattr(expected, field).data)
    prompt = [5, 17, 80, 3, 44, 9]
    (tokens,) = paged_model(str(folder), quantization="compressed-tensors", max_len=128).greedy([prompt], 64)
    model = transformers.Qwen3ForCausalLM.from_pretrained(plain).requires_grad_(False)
    exact = model(torch.tensor([prompt + tokens])).logits[0]
    for name, module in model.named_modules():
        if name.endswith(PROJECTIONS):
            module.register_forward_pre_hook(rounded)
    logits = model(torch.tensor([prompt + tokens])).logits[0]
    # On the border between two steps a number may fall on either side: of two tokens as likely either may be chosen.
    behind = [float(logits[len(prompt) - 1 + place].amax() - logits[len(prompt) - 1 + place, token])
              for place, token in enumerate(tokens)]  # fmt: skip
    assert len(tokens) == 64
    assert max(behind) < 0.1 * float((logits - exact).abs().amax()) + 1e-3


@pytest.mark.parametrize(("settings", "words"), [
    (config(symmetric=False), "weights.symmetric False"),
    (config(strategy="group"), "weights.strategy 'group' is not supported; it must be channel, tensor"),
    (config(num_bits=4), "weights 'int4' is not supported; it must be 8-bit integers on both sides"),
    (config({"type": "float"}), "input_activations 'float8'"),
    (config(form="pack-quantized"), "format 'pack-quantized' is not supported; it must be int-quantized"),
])  # fmt: skip
def test_a_setting_that_is_not_supported_is_named(
    dense: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    found = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=words):
        build_spec(read_source(str(tmp_path)))


def test_a_weight_or_a_scale_of_another_type_is_named(dense: Path, tmp_path: Path) -> None:
    folder, _ = write(dense, tmp_path, config(), quantized)
    name = "model.layers.1.mlp.up_proj.weight"
    damaged(folder, lambda tensors: tensors.update({name: tensors[name].float()}))
    with pytest.raises(ModelError, match=f"tensor {name} is F32, but quantization_config says I8"):
        load(folder)
    damaged(folder, lambda tensors: tensors.pop(f"{name}_scale"))
    damaged(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelError, match=f"lacks {name}_scale"):
        load(folder)


def test_what_is_not_used_is_told_and_memory_counts_integers(dense: Path, tmp_path: Path) -> None:
    folder, plain = write(dense, tmp_path, config({"dynamic": False, "symmetric": False}), quantized)
    spec, whole = (build_spec(read_source(str(each))) for each in (folder, plain))
    assert spec.checkpoint is not None
    assert spec.checkpoint.note == "the checkpoint's static activation scales and its activations' zero points"
    rows = sum(each.shape[0] for each in spec.parameters() if each.role == "linear")
    cells = sum(each.elements for each in spec.parameters() if each.role == "linear")
    assert abs(whole.parameter_bytes("bfloat16") - spec.parameter_bytes("bfloat16") - (cells - 4 * rows)) < 256 * 16
    good = resolve(EngineConfig(str(folder), quantization="compressed-tensors"), spec, "cuda")
    more = activation_bytes(good, spec, 100) - activation_bytes(good, whole, 100)
    assert more == 100 * (spec.ffn + 4)
    with pytest.raises(ConfigError, match="quantization is fp8, but the checkpoint's weights are INT8 with act"):
        resolve(EngineConfig(str(folder), quantization="fp8"), spec, "cuda")
