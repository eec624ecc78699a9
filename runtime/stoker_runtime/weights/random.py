"""Random weights for a shape: the speed of a model without its files.

Invariants: drawn on the device from one seed, so equal seeds give equal weights on equal devices; scaled so that
activations keep a size near one through any depth, and no token's logits run away.
Knows nothing of checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker_runtime.models.parameter import Parameter, Role, stored_kind
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.rank_cut import RankCut

STD = 0.02
# Of layers with a state, as Mamba-2 is initialized: the steps of time before a token changes them, and how fast a state
# fades in one. So it lasts from a few tokens to thousands, and what a layer gives hangs on it.
STEPS, RATES = (1e-3, 1e-1), (1.0, 16.0)


def fill_random(arena: WeightArena, seed: int, cut: RankCut | None = None) -> None:
    """Fill every parameter of `arena`: norms 1, biases and matrices normal with a deviation of 0.02 or less, and what a
    state lives by as `_draw` says.

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
        if stored_kind(parameter, arena.quantization) != "dense":
            if parameter.name == "head" and arena.spec.tie_embeddings:
                arena.quantize("head", arena.table())
                continue
            weight = torch.empty(parameter.shape, dtype=arena.dtype, device=arena.device)
            arena.quantize(parameter.name, _draw(weight, parameter, arena.spec.num_layers, generator))
        else:
            _draw(arena.dense[parameter.name], parameter, arena.spec.num_layers, generator)


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
            dtype = torch.float32 if parameter.dtype == "float32" else arena.dtype
            whole = torch.empty(parameter.shape, dtype=dtype, device=arena.device)
            _draw(whole, parameter, cut.whole.num_layers, generator)
        if parameter.name == "embed" and cut.whole.tie_embeddings:
            table = whole
        if name is None:
            continue
        if name not in arena.dense:
            arena.quantize(name, cut.values(name, whole))
        else:
            arena.dense[name].copy_(cut.values(name, whole))


def _draw(place: Tensor, parameter: Parameter, num_layers: int, generator: torch.Generator) -> Tensor:
    """Draw a parameter into `place`; → that.

    Taps of a convolution keep a channel's size; steps of time and rates at which states fade lie in `STEPS` and
    `RATES`; what passes a state by does so unchanged.
    """
    field = parameter.name.rpartition(".")[2]
    if field == "skip":
        return place.fill_(1.0)
    if field == "a_log":
        return place.uniform_(*RATES, generator=generator).log_()
    if field == "dt_bias":
        steps = place.uniform_(*map(math.log, STEPS), generator=generator).exp_()
        return steps.add_(torch.log(-torch.expm1(-steps)))  # whose softplus they are
    std = parameter.shape[-1] ** -0.5 if field == "conv" else _deviation(parameter, num_layers)
    return place.normal_(0.0, std, generator=generator)


def _deviation(parameter: Parameter, num_layers: int) -> float:
    """What writes into the residual stream is scaled down by the number of writers, as GPT-2 is initialized."""
    writes = parameter.name.endswith((".output", ".state_out", "down"))
    return STD / (2 * num_layers) ** 0.5 if writes else STD
