"""Random weights for a shape: the speed of a model without its files.

Invariants: drawn on the device from one seed, so equal seeds give equal weights on equal devices; scaled so that
activations keep a size near one through any depth, and no token's logits run away.
Knows nothing of checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_runtime.models.parameter import Parameter, Role, stored_kind
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.rank_cut import RankCut

STD = 0.02


def fill_random(arena: WeightArena, seed: int, cut: RankCut | None = None) -> None:
    """Fill every parameter of `arena`: norms 1, biases and matrices normal with a deviation of 0.02 or less.

    With `cut` the arena is a rank's, and takes its part of what one rank alone would draw.
    """
    generator = torch.Generator(device=arena.device).manual_seed(seed)
    if cut is not None:
        _fill_part(arena, generator, cut)
        return
    for parameter in arena.spec.parameters():
        if parameter.role in (Role.NORM, Role.GAIN):
            arena.dense[parameter.name].fill_(1.0)
            continue
        std = _deviation(parameter, arena.spec.num_layers)
        if stored_kind(parameter, arena.quantization) != "dense":
            if parameter.name == "head" and arena.spec.tie_embeddings:
                arena.quantize("head", arena.dense["embed"])
                continue
            weight = torch.empty(parameter.shape, dtype=arena.dtype, device=arena.device)
            arena.quantize(parameter.name, weight.normal_(0.0, std, generator=generator))
        else:
            arena.dense[parameter.name].normal_(0.0, std, generator=generator)


def _fill_part(arena: WeightArena, generator: torch.Generator, cut: RankCut) -> None:
    table: Tensor | None = None
    for parameter in cut.whole.parameters():
        name = cut.local_name(parameter.name)
        if parameter.role in (Role.NORM, Role.GAIN):
            if name is not None:
                arena.dense[name].fill_(1.0)
            continue
        # Drawn whole, and also where it is another rank's: what follows depends on how much was drawn.
        if parameter.name == "head" and table is not None:
            whole = table
        else:
            whole = torch.empty(parameter.shape, dtype=arena.dtype, device=arena.device)
            whole.normal_(0.0, _deviation(parameter, cut.whole.num_layers), generator=generator)
        if parameter.name == "embed" and cut.whole.tie_embeddings:
            table = whole
        if name is None:
            continue
        if name not in arena.dense:
            arena.quantize(name, cut.values(name, whole))
        else:
            arena.dense[name].copy_(cut.values(name, whole))


def _deviation(parameter: Parameter, num_layers: int) -> float:
    """What writes into the residual stream is scaled down by the number of writers, as GPT-2 is initialized."""
    writes = parameter.name.endswith((".output", ".state_out", "down"))
    return STD / (2 * num_layers) ** 0.5 if writes else STD
