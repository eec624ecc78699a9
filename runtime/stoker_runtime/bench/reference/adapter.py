"""A model's weights with a LoRA adapter, as the oracle `reference.model` multiplies them: base and low ranks apart.

Invariants: reads the PEFT folder by itself, and shares nothing with the engine's reader. Knows nothing of products with
the base weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from stoker_kernels.quant import AnyWeight
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights

PIECES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The pieces of each linear in the order of their rows, by the last word of a module's name."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A linear and what an adapter adds to its pieces, in the order of their rows: `[r, K]` and `[N', r]`, fp32."""

    base: AnyWeight
    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]

    def added(self, x: Tensor) -> Tensor:
        """What the adapter adds to the product with x `[T, K]`: `[T, N]`."""
        pairs = zip(self.downs, self.ups, strict=True)
        return torch.cat([x @ down.to(x.device).t() @ up.to(x.device).t() for down, up in pairs], dim=1)


def adapted(weights: DecoderWeights, folder: Path) -> DecoderWeights:
    """`weights` with the adapter in `folder`, which changes all pieces of a linear or none, in every layer alike."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    layers = [_with(layer, f".layers.{index}.", tensors, scale) for index, layer in enumerate(weights.layers)]
    return replace(weights, layers=tuple(layers))


def _with(layer: LayerWeights, place: str, tensors: dict[str, Tensor], scale: float) -> LayerWeights:
    changed: dict[str, Any] = {}
    for name, pieces in PIECES.items():
        ends = tuple(f".{piece}.lora_A.weight" for piece in pieces)
        found = [key for end in ends for key in tensors if place in key and key.endswith(end)]
        if found:
            downs = tuple(tensors[key].float() for key in found)
            ups = tuple(tensors[key.replace("lora_A", "lora_B")].float() * scale for key in found)
            changed[name] = cast("AnyWeight", AdaptedWeight(getattr(layer, name), downs, ups))
    return replace(layer, **changed)
