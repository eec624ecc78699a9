"""Nemotron-H beyond its rows of the table, dense and with mixtures of experts: quantized checkpoints and weights
quantized at load, experts without a gate; what a published model takes, and settings that are not understood.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.models.test_quantized_hybrid import assert_rounded, fp8
from tests.runtime.weights.both_ways import save_both
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
from tests.runtime.weights.test_integer_experts import load
from torch import Tensor

from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.parameter import Role
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 104, "hidden_size": 96, "layers_block_type": None, "hybrid_override_pattern": "MEM*E", "head_dim": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160, "mamba_num_heads": 8,
    "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 3, "chunk_size": 16,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 64, "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip
# As published: what attends, and the Mamba-2 layer before it, in 16 bits, by their whole names.
LEFT = ["lm_head", *(f"backbone.layers.3.mixer.{each}_proj" for each in "qkvo"), "backbone.layers.2.mixer.in_proj",
        "backbone.layers.2.mixer.out_proj"]  # fmt: skip
Way = tuple[dict[str, Any], Callable[[Tensor], Quantized], str]


def fp8_tensor(weight: Tensor) -> Quantized:
    parts, value = fp8(weight, "fp8_tensor", "weight_scale")
    return parts | {"weight_scale": parts["weight_scale"].reshape(()), "input_scale": torch.tensor(0.03)}, value


FORMATS: dict[str, Way] = {
    "fp8": (modelopt_config("FP8", exclude_modules=LEFT, kv_cache_quant_algo="FP8"), fp8_tensor, "fp8_channel"),
    "nvfp4": (
        modelopt_config("NVFP4", group_size=16, exclude_modules=LEFT), lambda w: nvfp4(w, modelopt=True), "nvfp4"
    ),
    "int4": (compressed_config(32, zeros=True) | {"ignore": LEFT}, lambda w: compressed(w, 32, zeros=True), "int4"),
    "awq": (AWQ_CONFIG | {"modules_to_not_convert": LEFT}, lambda w: awq(w, 32), "int4"),
    "gptq": (gptq_config(32, dynamic={f"-:{re.escape(name)}$": {} for name in LEFT}), lambda w: gptq(w, 32), "int4"),
}  # fmt: skip
PATTERNS = {"mixtures": SIZES["hybrid_override_pattern"], "dense": "M-M*-"}


def made(folder: Path, kind: str = "mixtures") -> Path:
    import transformers

    sizes = SIZES | {"hybrid_override_pattern": PATTERNS[kind]}
    config = transformers.NemotronHConfig(**{key: value for key, value in sizes.items() if value is not None})
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name and "weight" in name else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def write(folder: Path, form: str, kind: str = "mixtures") -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    config, quantize, _ = FORMATS[form]
    dense = made(folder / "made", kind)
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if module in LEFT or not name.endswith("_proj.weight"):
            continue
        parts, tensors[name] = quantize(packed.pop(name))
        packed |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    if form == "fp8":
        packed |= {f"backbone.layers.3.mixer.{each}_proj.{each}_scale": torch.tensor(0.5) for each in "kv"}
    settings = json.loads((dense / "config.json").read_text())
    return save_both(folder, settings, packed, config, tensors)


@pytest.mark.matrix("kind", take=5)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_weights_logits_and_tokens_are_those_of_the_values(
    kind: str, form: str, tmp_path: Path, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    quantized, plain = write(tmp_path, form, kind)
    ours, theirs = load(quantized), load(plain)
    kinds = []
    for layer, exact in zip(ours.layers, theirs.layers, strict=True):
        for got, wanted in zip(layer.linears, exact.linears, strict=True):
            torch.testing.assert_close(values_of(got).float(), values_of(wanted), rtol=1e-6, atol=0.0)
            kinds.append(got.kind if hasattr(got, "kind") else "int4")
        if layer.mixture is None or exact.mixture is None:
            continue
        assert (layer.mixture.experts.kind, layer.mixture.experts.gated) == (FORMATS[form][2], False)
        pair = (expert_values(each.mixture.experts, 3) for each in (layer, exact) if each.mixture is not None)
        for got_values, wanted_values in zip(*pair, strict=True):
            torch.testing.assert_close(got_values, wanted_values, rtol=1e-6, atol=0.0)
    narrow = FORMATS[form][2]
    # Mamba-2, what feeds forward or a mixture's shared expert, Mamba-2 and attention in 16 bits, another of these.
    assert kinds == [*[narrow] * 4, *["dense"] * 4, *[narrow] * 2]
    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    model.generation_config.eos_token_id = None
    ids = random.Random(form).choices(range(3, 104), k=41)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    spec = build_spec(read_source(str(quantized)))
    served = paged_model(str(quantized), quantization=resolve_quantization("auto", spec), max_len=128)
    logits = served.step([(0, ids)], all_logits=True)[0]
    if form == "fp8":
        assert ours.kv_scales is not None
        assert ours.kv_scales[3].unique().tolist() == [0.5]
        assert_rounded(logits, expected, lambda: reference_logits(spec, ours, ids, 0), monkeypatch)
        return
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    served.forget()
    for prompt, tokens in zip(prompts := [ids[:9], ids[20:]], served.greedy(prompts, 64), strict=True):
        found = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert tokens == found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("quantization", ["fp8", "w4"])
def test_what_is_rounded_at_load_is_multiplied_so(
    quantization: str, tmp_path: Path, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = made(tmp_path), random.Random(quantization).choices(range(3, 104), k=30)
    source = read_source(str(folder))
    spec = build_spec(source)
    weights = load_weights(source, spec, CPU, torch.float32, quantization)
    exact = paged_model(str(folder)).step([(0, ids)], all_logits=True)[0]
    logits = paged_model(str(folder), quantization=quantization).step([(0, ids)], all_logits=True)[0]
    if quantization == "fp8":
        assert_rounded(logits, exact, lambda: reference_logits(spec, weights, ids, 0), monkeypatch)
    else:
        torch.testing.assert_close(logits, reference_logits(spec, weights, ids, 0), atol=1e-3, rtol=1e-3)
        assert (logits - exact).norm() > 0.05 * exact.norm()
    arena = WeightArena(spec, CPU, torch.bfloat16, quantization)
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", quantization)


NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 131072, "hidden_size": 2688, "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "mlp_hidden_act": "relu2",
    "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "time_step_limit": [0.0, float("inf")], "residual_in_fp32": False,
    "dtype": "bfloat16",
}  # fmt: skip


def spec_of(**changes: Any) -> Any:
    return build_spec(ModelSource("nano", SourceKind.SHAPE, None, NANO | changes))


def test_a_published_model_has_as_many_parameters_as_its_makers_say() -> None:
    """31.6 billion, of which 3.6 are active, as the card of Nemotron 3 Nano has it, embeddings included."""
    spec = spec_of()
    elements = {role: sum(each.elements for each in spec.parameters() if each.role is role) for role in Role}
    assert sum(elements.values()) == pytest.approx(31.6e9, rel=2e-3)
    active = sum(elements.values()) - elements[Role.EXPERTS] * (128 - 6) / 128
    assert active == pytest.approx(3.6e9, rel=0.02)
    assert (len(spec.moe.layers), len(spec.attending), spec.recurrent.layers) == (23, 6, 23)


@pytest.mark.parametrize(("changes", "message"), [
    ({"moe_latent_size": 1024}, "moe_latent_size is 1024"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; experts without a gate have relu2"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"num_experts_per_tok": 129}, "129 of 128 experts"),
    ({"quantization_config": modelopt_config("NVFP4", group_size=16), "moe_intermediate_size": 1848},
     "experts in NVFP4 are not .*rows have 1848 columns, no whole blocks of 16"),
])  # fmt: skip
def test_settings_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**changes)
