"""Tiny checkpoints in integers, written as their makers write them: word by word after the formats' definitions, and
compressed-tensors' by the library itself. Beside each the values that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.runtime.weights.both_ways import save_both
from torch import Tensor

from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import IntegerWeight
from stoker_runtime.config import EngineConfig
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
WIDE_SHAPE = SHAPE | {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
"""Whose rows have whole groups of 128 columns."""
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


def ordered(k: int, group: int, seed: int) -> tuple[Tensor, Tensor]:
    """Columns as they are quantized, at random or with seed 0 as they lie, and the group of each where it lies."""
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(k)
    return columns, columns.argsort() // group


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
    columns, groups = ordered(k, group or k, (seed or k) if act_order else 0)
    codes, scale, zero = integers(weight[:, columns], bits, group, zeros)
    back = codes[:, columns.argsort()]
    places = tuple(range(32 // bits))
    stored = zero.t() if v2 else zero.t() - 1
    packed = {
        "qweight": words(back, bits, places).t(), "qzeros": words(stored, bits, places), "scales": scale.t(),
        "g_idx": groups.int(), "bias": torch.zeros(n).half(),
    }  # fmt: skip
    return packed, value(back, scale, zero, groups)


def compressed(
    weight: Tensor, group: int, bits: int = 4, *, zeros: bool = False, act_order: bool = False
) -> Quantized:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    k = weight.shape[1]
    columns, groups = ordered(k, group or k, k if act_order else 0)
    codes, scale, zero = integers(weight[:, columns], bits, group, zeros)
    codes = codes[:, columns.argsort()]
    half = 1 << (bits - 1)
    packed = {
        "weight_packed": pack_to_int32((codes - half).to(torch.int8), bits),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        packed["weight_zero_point"] = pack_to_int32((zero - half).to(torch.int8), bits, packed_dim=0)
    if act_order:
        packed["weight_g_idx"] = groups.int()
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
Form = tuple[dict[str, Any], Callable[[Tensor], Quantized]]
"""A configuration, and what is written under it."""
FORMATS: dict[str, Form] = {
    "awq": (AWQ_CONFIG, lambda w: awq(w, 32)),
    "awq-column": (AWQ_CONFIG | {"group_size": -1, "modules_to_not_convert": None}, lambda w: awq(w, 0)),
    "gptq": (gptq_config(16), lambda w: gptq(w, 16)),
    "gptq-symmetric": (gptq_config(32, sym=True), lambda w: gptq(w, 32, zeros=False)),
    "gptq-8": (gptq_config(32, 8), lambda w: gptq(w, 32, 8)),
    "gptq-act-order": (gptq_config(32, desc_act=True), lambda w: gptq(w, 32, act_order=True)),
    # Quantized by activation in groups of neighbours, so that these are what a file has; and otherwise.
    "gptq-static-groups": (gptq_config(32, desc_act=True, static_groups=True), lambda w: gptq(w, 32)),
    "gptq-static-groups-ordered": (
        gptq_config(16, desc_act=True, static_groups=True), lambda w: gptq(w, 16, act_order=True, seed=77)
    ),
    "gptq-v2": (gptq_config(16, checkpoint_format="gptq_v2"), lambda w: gptq(w, 16, v2=True)),
    "gptq-column": (gptq_config(0), lambda w: gptq(w, 0)),
    "compressed": (compressed_config(32), lambda w: compressed(w, 32)),
    "compressed-8": (compressed_config(32, 8), lambda w: compressed(w, 32, 8)),
    "compressed-channel": (compressed_config(0), lambda w: compressed(w, 0)),
    "compressed-zeros": (compressed_config(16, zeros=True), lambda w: compressed(w, 16, zeros=True)),
    "compressed-8-channel": (compressed_config(0, 8), lambda w: compressed(w, 0, 8)),
    "compressed-act-order": (compressed_config(32, actorder="group"), lambda w: compressed(w, 32, act_order=True)),
}  # fmt: skip
WIDE: dict[str, Form] = {
    "awq-64": (AWQ_CONFIG | {"group_size": 64}, lambda w: awq(w, 64)),
    "awq-128": (AWQ_CONFIG | {"group_size": 128}, lambda w: awq(w, 128)),
    "gptq-64": (gptq_config(64), lambda w: gptq(w, 64)),
    "gptq-128": (gptq_config(128, sym=True), lambda w: gptq(w, 128, zeros=False)),
}  # fmt: skip
"""Of WIDE_SHAPE; those of FORMATS are of SHAPE."""
ORDERED = [form for form in FORMATS if "act-order" in form or "static" in form]
"""Which one rank alone serves."""
Written = tuple[Path, Path]


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


def damaged(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder
