"""Adapters of SmolLM2-135M as PEFT saves them, with random weights, small enough for a ConfigMap.

Knows nothing of clusters.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save

HIDDEN, LAYERS = 576, 30
Files = dict[str, bytes]


def adapter(seed: int, *, rank: int = 2, hidden: int = HIDDEN, layers: int = LAYERS, **settings: Any) -> Files:
    """The files of an adapter of the query projections; its weights change every token that the model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = (torch.randn((rank, hidden), generator=generator) * 0.2).half()
        tensors[f"{name}.lora_B.weight"] = (torch.randn((hidden, rank), generator=generator) * 0.5).half()
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 8 * rank, "target_modules": ["q_proj"],
        "layers_to_transform": list(range(layers)), **settings,
    }  # fmt: skip
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}
