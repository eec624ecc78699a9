"""The calibrated scales of a checkpoint for an e4m3 KV cache: found by name, checked, and put side by side.

A key or value is stored as `x / scale` and read as `stored · scale`. The names are those of compressed-tensors,
ModelOpt, AutoFP8 and vLLM; one number holds for all heads of a layer, or there is one for each.
Invariants: a scale is finite and above zero, and a layer has both or none; otherwise a ModelError names the tensor. A
layer without scales has 1.
Knows nothing of how a cache is read or written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES

Entries = dict[str, TensorEntry]
KvScales = dict[tuple[int, str], TensorEntry]
"""(layer, "k" or "v") → its scale."""

_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.\w+\."
    r"(?:(?:attn\.)?(?P<own>k|v|kv)_scale|(?P<linear>k|v)_proj\.(?:(?P=linear)_scale|output_scale))"
)


def split_kv_scales(entries: Entries) -> tuple[Entries, KvScales]:
    """The other tensors, and the scales. Raises ModelError where two have the same place."""
    rest, found = dict[str, TensorEntry](), KvScales()
    for name, entry in entries.items():
        match = _NAME.fullmatch(name)
        if match is None:
            rest[name] = entry
            continue
        for letter in match["own"] or match["linear"]:
            place = (int(match["layer"]), letter)
            if place in found:
                raise ModelError(f"{entry.file}: tensors {found[place].name} and {name} are scales of the same cache.")
            found[place] = entry
    return rest, found


def read_kv_scales(
    spec: ModelSpec, found: Mapping[tuple[int, str], TensorEntry], device: torch.device
) -> Tensor | None:
    """`[layers, 2, Hkv]` fp32, those of keys first; None where there are none. Raises ModelError or OSError."""
    if not found:
        return None
    scales = torch.ones(spec.num_layers, 2, spec.kv_heads, dtype=torch.float32)
    for (layer, letter), entry in found.items():
        other = "kv".replace(letter, "")
        if (layer, other) not in found:
            raise ModelError(f"{entry.file}: tensor {entry.name} is there, but layer {layer} lacks its {other}_scale.")
        if layer >= spec.num_layers:
            raise ModelError(f"{entry.file}: tensor {entry.name} is of no layer; the model has {spec.num_layers}.")
        scales[layer, "kv".index(letter)] = _numbers(entry, spec.kv_heads)
    return scales.to(device)


def _numbers(entry: TensorEntry, heads: int) -> Tensor:
    """One number, or one for each head."""
    if entry.encoding not in PLAIN_DTYPES or prod(entry.shape) not in (1, heads):
        raise ModelError(
            f"{entry.file}: tensor {entry.name} is {entry.encoding} {list(entry.shape)}; the scale of a cache is one "
            f"number, or {heads}, one for each of its heads."
        )
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        held = bytearray(file.read(entry.num_bytes))
    numbers = torch.frombuffer(held, dtype=PLAIN_DTYPES[entry.encoding]).float()
    for number in numbers.tolist():
        if not (math.isfinite(number) and number > 0):
            raise ModelError(f"{entry.file}: tensor {entry.name} holds {number:g}; a scale is finite and above zero.")
    return numbers
