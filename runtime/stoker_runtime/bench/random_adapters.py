"""Writes random adapters for a benchmark: PEFT folders on every linear of a model that can be adapted.

Knows nothing of what is measured, nor of how the folders are read.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.models.spec import ModelSpec

# Of what an adapter adds to a weight: a quarter of a random weight, so that a wrong one shows, and logits stay as wide.
SPREAD = 0.005
# Numbers of an adapter that are drawn; its matrices begin among them at random.
DRAWN = (1 << 18) + 1


def write_adapters(spec: ModelSpec, count: int, rank: int, folder: Path) -> tuple[Path, ...]:
    """Write `count` adapters of `rank`, in bf16, into folders of their own in `folder`; returns these."""
    places = AdapterLayout.of(spec, embeddings=False).places
    modules = {piece.module: piece.shape for place in places for piece in place.pieces}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    folders = tuple(folder / f"random-{number}" for number in range(count))
    for number, path in enumerate(folders):
        generator = torch.Generator().manual_seed(number)
        drawn = (torch.randn(DRAWN, generator=generator) * (SPREAD / rank**0.5) ** 0.5).to(torch.bfloat16)
        tensors = {}
        for module, (rows, columns) in modules.items():
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                start = int(torch.randint(DRAWN, (), generator=generator))
                values = drawn.roll(-start).repeat(-(-shape[0] * shape[1] // DRAWN))[: shape[0] * shape[1]]
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.view(shape)
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
    return folders
