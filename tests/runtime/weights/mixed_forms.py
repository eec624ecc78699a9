"""Tiny checkpoints whose layers are quantized in several schemes, drawn at random, as their makers write them; beside
each the values that it stands for.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.runtime.weights.both_ways import save_both
from tests.runtime.weights.integer_forms import (
    Quantized,
    compressed,
    compressed_config,
    dense_value,
    gptq,
    gptq_config,
)
from tests.runtime.weights.test_fp4_checkpoint import nvfp4
from torch import Tensor

from stoker_kernels.fp4_gemm import dequantize_fp4
from stoker_kernels.quant import AnyWeight, Fp4Weight, Int8Weight, IntegerWeight, LinearWeight

FIELDS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


def fp8(weight: Tensor) -> Quantized:
    """A scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


def fp8_whole(weight: Tensor) -> Quantized:
    """A scale for all, as ModelOpt writes it, beside one of activations."""
    scale = weight.abs().amax() / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.3)}, data.float() * scale


def int8(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    data = (weight / scale).round().to(torch.int8)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


@dataclass(frozen=True, eq=False)
class Scheme:
    """`settings` are a group's of compressed-tensors, or what GPTQ's `dynamic` changes, or ModelOpt's of a layer."""

    settings: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]
    kind: str
    most: float = 0.0
    """What activations are quantized to: the largest number there is; 0: they are not."""


def packed(group: int, bits: int, *, zeros: bool = False) -> Scheme:
    lot = compressed_config(group, bits, zeros=zeros)["config_groups"]["group_0"] | {"format": "pack-quantized"}
    return Scheme(lot, lambda w: compressed(w, group, bits, zeros=zeros), f"int{bits}")


def eight(form: str, kind: str, quantize: Callable[[Tensor], Quantized], most: float) -> Scheme:
    number = {"num_bits": 8, "type": "float" if "float" in form else "int", "symmetric": True}
    lot = {"weights": number | {"strategy": "channel"}, "input_activations": number | TOKEN, "format": form}
    return Scheme(lot, quantize, kind, most)


def changed(bits: int, group: int) -> Scheme:
    return Scheme({"bits": bits, "group_size": group or -1}, lambda w: gptq(w, group, bits), f"int{bits}")


FP8 = eight("float-quantized", "fp8_channel", fp8, 448.0)
INT8 = eight("int-quantized", "int8_channel", int8, 127.0)
FOUR_FLOAT = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 = Scheme(
    {"weights": FOUR_FLOAT, "input_activations": None, "format": "nvfp4-pack-quantized"},
    lambda w: nvfp4(w, modelopt=False), "nvfp4",
)  # fmt: skip
COMPRESSED: dict[str, list[Scheme | None]] = {
    "integers": [packed(32, 4), packed(0, 8), packed(16, 4, zeros=True), None],
    "integers-and-fp8": [packed(32, 4), FP8, None],
    "integers-and-int8": [packed(80, 8, zeros=True), INT8, None],
    "four-bit-floats-and-fp8": [NVFP4, FP8, packed(0, 4)],
}
DYNAMIC: dict[str, list[Scheme | None]] = {
    "gptq-4-8": [changed(4, 32), changed(8, 16), None],
    "gptq-rows": [changed(8, 0), changed(4, 32), changed(4, 80)],
}
MODELOPT: list[Scheme | None] = [
    Scheme({"quant_algo": "NVFP4", "group_size": 16}, lambda w: nvfp4(w, modelopt=True), "nvfp4"),
    Scheme({"quant_algo": "FP8"}, fp8_whole, "fp8_channel", 448.0),
    None,
]
Chosen = dict[str, Scheme | None]


def choose(schemes: Sequence[Scheme | None], layers: int, rng: random.Random) -> Chosen:
    """A scheme for each module, each at least once; those of one matrix have one, but for integers in turn."""
    matrices = [(layer, field) for layer in range(layers) for field in FIELDS]
    drawn = [*schemes, *rng.choices(schemes, k=len(matrices) - len(schemes))]
    rng.shuffle(drawn)
    found: Chosen = {}
    for (layer, field), scheme in zip(matrices, drawn, strict=True):
        same = [each for each in schemes if each and scheme and {each.kind, scheme.kind} <= {"int4", "int8"}]
        for module in FIELDS[field]:
            found[f"model.layers.{layer}.{module}"] = rng.choice(same) if same else scheme
    return found


def write(dense: Path, folder: Path, config: dict[str, Any], chosen: Chosen) -> tuple[Path, Path]:
    """The checkpoint in `folder/q`, and in `folder/d` a dense one of the values that it stands for."""
    stored, plain = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        module = name.removesuffix(".weight")
        stored[name] = plain[name] = tensor
        if (scheme := chosen.get(module)) is not None:
            parts, plain[name] = scheme.quantize(tensor)
            stored.pop(name)
            stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    settings = json.loads((dense / "config.json").read_text())
    return save_both(folder, settings, stored, config, plain)


def modules_of(chosen: Chosen, scheme: Scheme | None) -> list[str]:
    return [module for module, each in chosen.items() if each is scheme]


def pattern_of(modules: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, modules))})$"


def compressed_groups(chosen: Chosen, rng: random.Random) -> dict[str, Any]:
    """A `quantization_config`: of some schemes names, of some a regular expression, of one all other linears."""
    schemes = [each for each in dict.fromkeys(chosen.values()) if each is not None]
    rng.shuffle(schemes)
    groups = {}
    for number, scheme in enumerate(schemes):
        modules = modules_of(chosen, scheme)
        named = modules if number == 0 else [f"re:{pattern_of(modules)}"]
        targets = ["Linear"] if scheme is schemes[-1] else named
        groups[f"group_{number}"] = scheme.settings | {"targets": targets}
    ignored = ["lm_head", *modules_of(chosen, None)]
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": ignored,
    }  # fmt: skip


def dynamic(chosen: Chosen, base: Scheme) -> dict[str, Any]:
    """GPTQ's, where all but `base` are patterns; one of the whole model stands last, and comes too late."""
    rules = {f"-:{pattern_of(modules_of(chosen, None))}": {}}
    for scheme in dict.fromkeys(chosen.values()):
        if scheme is not None and scheme is not base:
            rules[f"+:{pattern_of(modules_of(chosen, scheme))}"] = scheme.settings
    rules[f"+:{pattern_of(modules_of(chosen, base))}"] = {}
    rules["-:.*"] = {}
    return gptq_config(base.settings["group_size"], base.settings["bits"], dynamic=rules)


def layers(chosen: Chosen) -> dict[str, Any]:
    """ModelOpt's, of `hf_quant_config.json`."""
    found = {module: each.settings for module, each in chosen.items() if each is not None}
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": found}
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": inner}


def value(weight: AnyWeight) -> Tensor:
    """The numbers of a weight, columns in the order of x."""
    if isinstance(weight, IntegerWeight):
        return dense_value(weight)
    if isinstance(weight, Fp4Weight):
        return dequantize_fp4(weight, torch.float32)
    assert isinstance(weight, LinearWeight | Int8Weight)
    return weight.data if weight.kind == "dense" else weight.data.float() * weight.scale
