"""Random weights for a shape: the speed of a model without its files.

Invariants: drawn on the device from one seed, so equal seeds give equal weights on equal devices; scaled so that
activations keep a size near one through any depth, and no token's logits run away.
Knows nothing of checkpoints.
"""

from __future__ import annotations

import torch

from stoker_runtime.models.spec import Parameter, Role, stored_kind
from stoker_runtime.weights.layout import WeightArena

STD = 0.02


def fill_random(arena: WeightArena, seed: int) -> None:
    """Fill every parameter of `arena`: norms 1, biases and matrices normal with a deviation of 0.02 or less."""
    generator = torch.Generator(device=arena.device).manual_seed(seed)
    for parameter in arena.spec.parameters():
        if parameter.role is Role.NORM:
            arena.dense[parameter.name].fill_(1.0)
            continue
        std = _deviation(parameter, arena.spec.num_layers)
        if stored_kind(parameter, arena.quantization) != "dense":
            weight = torch.empty(parameter.shape, dtype=arena.dtype, device=arena.device)
            arena.quantize(parameter.name, weight.normal_(0.0, std, generator=generator))
        else:
            arena.dense[parameter.name].normal_(0.0, std, generator=generator)


def _deviation(parameter: Parameter, num_layers: int) -> float:
    """What writes into the residual stream is scaled down by the number of writers, as GPT-2 is initialized."""
    writes = parameter.name.endswith((".output", ".down"))
    return STD / (2 * num_layers) ** 0.5 if writes else STD
