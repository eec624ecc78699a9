"""DeepSeek's attention from checkpoints in four bits, as they are published: what widens latents becomes 16 bits, all
else stays; weights bit for bit, logits and tokens of transformers on the values that are meant, and parts of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
from tests.runtime.weights.test_fp4_checkpoint import modelopt_config, nvfp4
from tests.runtime.weights.test_integer_experts import COMMON, load
from torch import Tensor

from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place
from stoker_runtime.weights.load import load_weights

SIZES: dict[str, Any] = COMMON | {
    "hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 6, "n_group": 3,
    "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16, "num_nextn_predict_layers": 0,
}  # fmt: skip
# Without act-order for experts; with it where none are in integers.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized], str]] = {
    "awq": (AWQ_CONFIG | {"modules_to_not_convert": ["mlp.gate."]}, lambda w: awq(w, 32), ""),
    "gptq-act-order": (
        gptq_config(32, desc_act=True, dynamic={r"-:.*\.mlp\..*": {}}), lambda w: gptq(w, 32, act_order=True), ".mlp."
    ),
    "compressed": (compressed_config(32), lambda w: compressed(w, 32), ""),
    "nvfp4": (modelopt_config("NVFP4", group_size=16), lambda w: nvfp4(w, modelopt=True), ""),
}  # fmt: skip


def write(folder: Path, form: str) -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    import transformers

    config, quantize, left = FORMATS[form]
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES)).float()
    generator = torch.Generator().manual_seed(len(form))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.1 * noise)
    model.save_pretrained(folder / "made")
    tensors = load_file(folder / "made" / "model.safetensors")
    packed = dict(tensors)
    for name in list(tensors):
        quantized = name.endswith(("_proj.weight", "_mqa.weight")) and not (left and left in name)
        if quantized:
            parts, tensors[name] = quantize(packed.pop(name))
            packed |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    settings = json.loads((folder / "made" / "config.json").read_text())
    return save_both(folder, settings, packed, config, tensors)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_logits_and_tokens_are_those_of_the_values(form: str, tmp_path: Path, paged_model: Any) -> None:

    quantized, plain = write(tmp_path, form)
    for ours, theirs in zip(load(quantized).layers, load(plain).layers, strict=True):
        assert ours.latent is not None
        assert theirs.latent is not None
        torch.testing.assert_close(ours.latent.kv_b, theirs.latent.kv_b, rtol=1e-6, atol=0.0)
        assert ours.latent.q_b is not None
        assert theirs.latent.q_b is not None
        torch.testing.assert_close(values_of(ours.latent.q_b), values_of(theirs.latent.q_b), rtol=1e-6, atol=0.0)
    method = FORMATS[form][0]["quant_method"]
    assert_equals_transformers(quantized, plain, method, form, paged_model)


@pytest.mark.parametrize("form", ["awq", "compressed", "nvfp4"])
def test_a_rank_has_what_widens_for_its_heads(form: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, form)
    source = read_source(str(quantized))
    spec = build_spec(source)
    kept = resolve_quantization("auto", spec)
    whole = load(quantized).layers[0].latent
    assert whole is not None
    for rank in range(2):
        cut = Cut(spec, Place(rank, 2, 1, whole_experts=True))
        mine = load_weights(source, cut.spec, torch.device("cpu"), torch.float32, kept, cut=cut).layers[0].latent
        assert mine is not None
        assert torch.equal(mine.kv_b, whole.kv_b[2 * rank : 2 * rank + 2])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "awq")
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.1.self_attn.kv_b_proj.qzeros"]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks tensor model.layers.1.self_attn.kv_b_proj.qzeros \[2, 24\]"):
        load(quantized)
