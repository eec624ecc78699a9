"""A layer's experts that rest in host memory, for the step that wants them: where they are, or copied to the device.

Kernels read the chosen experts' weights over the device's link, each once where few tokens choose them, at nine tenths
of what the link copies. Where most experts are chosen, or several tiles of tokens read one, a copy of all is faster.
Invariants: which follows from how many tokens a step has, not from what they choose, so a graph may capture it; the
place on the device is one for all layers, filled and read in the order of the stream.
Knows nothing of which layers these are, and of what multiplies.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.moe import ExpertWeights
from stoker_runtime.models.decoder_weights import MixtureWeights

# Choices of a step for each expert from which on all of a layer's are copied: by then nine of ten are chosen.
CHOICES_AN_EXPERT = 2


def experts_of(weights: MixtureWeights, choices: int) -> ExpertWeights:
    """Where a step of so many choices finds the experts of `weights`, which are copied there if need be."""
    staged = weights.staged
    if staged is None or choices < CHOICES_AN_EXPERT * weights.router.data.shape[0]:
        return weights.experts
    if not rehearsing():
        for field in fields(ExpertWeights):
            source, place = getattr(weights.experts, field.name), getattr(staged, field.name)
            if isinstance(source, Tensor) and source.data_ptr() != place.data_ptr():
                place.copy_(source, non_blocking=True)
    return staged
