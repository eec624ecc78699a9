"""Qwen3-Next and Qwen3.5 from quantized checkpoints: delta nets whose projections lie in groups or apart, attention
with a gate and experts, in FP8, integers of four bits and NVFP4, with what publishers leave in 16 bits. Weights bit for
bit in the decoder's order, logits and tokens of transformers on the values that are meant.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from tests.runtime.weights.test_fp4_checkpoint import compressed_config as float_config
from tests.runtime.weights.test_fp4_checkpoint import modelopt_config, nvfp4
from tests.runtime.weights.test_integer_experts import load
from torch import Tensor

from stoker_kernels.quant import WeightKind, dequantize, quantize_weight
from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.weights.layout import WeightArena

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 104, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "eos_token_id": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
# Heads that differ all; and such that blocks of 128 rows are of one part, as published ones are.
ODD = SIZES | {
    "hidden_size": 96, "head_dim": 24, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
    "intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 40,
}  # fmt: skip
WHOLE = ODD | {
    "hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
# As publishers leave them: routers and gates, the convolution (no linear layer) and what delta nets learn by.
LEFT = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
GATES = "re:.*linear_attn.in_proj_ba$"
NAMES = ("lm_head", "mlp.gate", "shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.conv1d")
BLOCK_CONFIG: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(
        f"model.layers.{layer}.{name}" for layer in range(3) for name in NAMES[1:]
    )],
}  # fmt: skip
FP8_CONFIG = float_config("float-quantized", 16) | {"ignore": LEFT, "config_groups": {"group_0": {
    "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
}}}  # fmt: skip
Way = tuple[dict[str, Any], dict[str, Any], Callable[[Tensor], Quantized], bool]
"""Sizes, quantization_config, how a matrix is rounded, and whether gates of the delta rule are left alone."""


def fp8(weight: Tensor, kind: WeightKind, suffix: str) -> Quantized:
    made = quantize_weight(weight, kind)
    assert made.scale is not None
    return {"weight": made.data, suffix: made.scale}, dequantize(made)


FORMATS: dict[str, Way] = {
    "fp8-block": (WHOLE, BLOCK_CONFIG, lambda w: fp8(w, "fp8_block", "weight_scale_inv"), True),
    "fp8-channel": (ODD, FP8_CONFIG, lambda w: fp8(w, "fp8_channel", "weight_scale"), False),
    "awq": (ODD, AWQ_CONFIG | {"modules_to_not_convert": ["mlp.gate", "shared_expert_gate", "in_proj_ba"]},
            lambda w: awq(w, 32), True),
    "gptq": (ODD, gptq_config(32, dynamic={r"-:.*mlp\.gate$": {}, r"-:.*shared_expert_gate$": {}}),
             lambda w: gptq(w, 32), False),
    "compressed": (ODD, compressed_config(32, zeros=True) | {"ignore": [*LEFT, GATES]},
                   lambda w: compressed(w, 32, zeros=True), True),
    "nvfp4": (ODD, modelopt_config("NVFP4", group_size=16, exclude_modules=[f"*{name}" for name in NAMES]),
              lambda w: nvfp4(w, modelopt=True), True),
    "compressed-nvfp4": (ODD, float_config("nvfp4-pack-quantized", 16) | {"ignore": LEFT},
                         lambda w: nvfp4(w, modelopt=False), False),
}  # fmt: skip
FLOATS = ("fp8-block", "fp8-channel")


MODELS = {
    "Qwen3NextForCausalLM": "Qwen3NextConfig", "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
}  # fmt: skip
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
MERGED = "in_proj_ba"
LINEARS = tuple(f"in_proj_{each}.weight" for each in ("qkvz", "ba", "qkv", "z", "b", "a"))


def apart(settings: Any) -> Any:
    """Settings that name what Qwen3-Next has in one tensor, of a model that has it in two."""
    if isinstance(settings, dict):
        return {key: apart(each) for key, each in settings.items()}
    if not isinstance(settings, list):
        return settings
    names = [[each.replace(MERGED, f"in_proj_{part}") for part in "ba"] if MERGED in str(each) else [each]
             for each in settings]  # fmt: skip
    return [each for both in names for each in both]


def write(folder: Path, way: Way, row: str = "Qwen3NextForCausalLM") -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    import transformers

    sizes, config, quantize, gates_left = way
    if row != "Qwen3NextForCausalLM":
        # Of as many heads as a word has codes.
        sizes, config = sizes | {"linear_num_value_heads": 8}, apart(config)
    if row == "Qwen3_5ForCausalLM":
        wide = {"intermediate_size": 2 * sizes["moe_intermediate_size"]}
        sizes = {key: each for key, each in (sizes | wide).items() if key not in OF_EXPERTS}
        # AWQ's are parts of names: of a router that is not there, and of gates that are.
        config = {key: [each for each in value if each != "mlp.gate"] if key == "modules_to_not_convert" else value
                  for key, value in config.items()}  # fmt: skip
    model = getattr(transformers, row)(getattr(transformers, MODELS[row])(**sizes)).float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if "norm" in name else 0.1 * noise)
    model.save_pretrained(folder / "made")
    tensors = load_file(folder / "made" / "model.safetensors")
    packed = dict(tensors)
    for name in list(tensors):
        left = name.endswith(("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight")) and gates_left
        if not name.endswith(("_proj.weight", *LINEARS)) or left:
            continue
        parts, tensors[name] = quantize(packed.pop(name))
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    # What only drafts has tensors of the kind, too.
    packed["mtp.fc.weight"] = torch.ones(4, 8)
    settings = json.loads((folder / "made" / "config.json").read_text())
    return save_both(folder, settings, packed, config, tensors)


def as_fp8(x: Tensor) -> Tensor:
    """What e4m3 with a scale a token leaves of numbers of any width."""
    scale = x.abs().amax(-1, keepdim=True) * (1 / 448)
    return (x * (1 / scale)).to(torch.float8_e4m3fn).float() * scale


def assert_rounded(
    logits: Tensor, exact: Tensor, reference: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations are rounded as the reference does it, until one on the edge between two e4m3 numbers falls otherwise
    and turns the choice of experts, and what follows in a state; those are no nearer to what nothing was rounded for.
    Of several texts some are spared that for long.
    """
    for module in ("weights", "mixture"):
        monkeypatch.setattr(f"stoker_runtime.bench.reference.{module}.as_fp8_reads", as_fp8)
    rounded = reference()
    apart, off = ((each - rounded).norm(dim=1) / rounded.norm(dim=1) for each in (logits, exact))
    assert apart.sort().values[len(apart) // 4] < 1e-3
    assert apart.mean() < off.mean() / 2
    assert 0.01 < off.mean() < 0.4


@pytest.mark.matrix(take=4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_logits_and_tokens_are_those_of_the_values(
    name: str, form: str, tmp_path: Path, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    quantized, plain = write(tmp_path, FORMATS[form], name)
    ours, theirs = load(quantized), load(plain)
    for layer, exact in zip(ours.layers, theirs.layers, strict=True):
        assert (layer.mixture is None) == (name == "Qwen3_5ForCausalLM")
        assert layer.mixture is None or layer.mixture.experts.kind != "dense"
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert getattr(weight, "kind", "packed") != "dense"
            found, expected = values_of(weight).float(), getattr(exact, field).data
            if field == "qkv" and layer.state is not None and layer.state.gates is not None:
                assert layer.state.gates.kind == "dense"
                found = torch.cat([found, values_of(layer.state.gates).float()])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        pair = (expert_values(each.mixture.experts, 3) for each in (layer, exact) if each.mixture is not None)
        for got, wanted in zip(*pair, strict=True) if layer.mixture is not None else ():
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)
    apart = [layer.state.gates is not None for layer in ours.layers if layer.state is not None]
    assert apart == [FORMATS[form][3]] * 2
    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    model.generation_config.eos_token_id = None
    draw = random.Random(form)
    texts = [draw.choices(range(3, 104), k=41) for _ in range(3 if form in FLOATS else 1)]
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in texts])
    spec = build_spec(read_source(str(quantized)))
    served = paged_model(str(quantized), quantization=resolve_quantization("auto", spec), max_len=128)
    logits = torch.cat(served.step([(at, ids) for at, ids in enumerate(texts)], all_logits=True))
    if form in FLOATS:
        reference = lambda: torch.cat([reference_logits(spec, ours, ids, 0) for ids in texts])  # noqa: E731
        assert_rounded(logits, expected, reference, monkeypatch)
        return
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
    served.forget()
    prompts = [texts[0][:9], texts[0][20:]]
    for prompt, tokens in zip(prompts, served.greedy(prompts, 64), strict=True):
        exact_tokens = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert tokens == exact_tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("form", ["fp8-block", "awq", "compressed-nvfp4"])
def test_bytes_are_those_of_the_arena(form: str, tmp_path: Path) -> None:
    spec = build_spec(read_source(str(write(tmp_path, FORMATS[form])[0])))
    kept = resolve_quantization("auto", spec)
    assert WeightArena(spec, CPU, torch.bfloat16, kept).num_bytes == spec.parameter_bytes("bfloat16", kept)


def test_blocks_that_have_rows_of_two_parts_are_named(tmp_path: Path) -> None:
    _, config, quantize, left = FORMATS["fp8-block"]
    quantized, _ = write(tmp_path, (ODD, config, quantize, left))
    with pytest.raises(ModelError, match=r"in_proj_qkvz.weight is brought apart by 16 rows; .*a multiple of 128"):
        load(quantized)


def test_a_scale_of_another_shape_is_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, FORMATS["fp8-channel"])
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight_scale"
    tensors[name] = tensors[name][:16].clone()
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"in_proj_qkvz.weight_scale is \[16, 1\]; .*one number, or \[384, 1\]"):
        load(quantized)


def test_a_part_of_what_attention_reads_is_refused(tmp_path: Path) -> None:
    sizes, config, quantize, left = FORMATS["compressed"]
    quantized, _ = write(tmp_path, (sizes, config | {"ignore": [*LEFT, "re:.*q_proj$"]}, quantize, left))
    with pytest.raises(ModelError, match=r"layers.1.qkv is one matrix here.*q_proj is not, .*k_proj is"):
        build_spec(read_source(str(quantized)))
