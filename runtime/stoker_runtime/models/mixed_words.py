"""How a spec's matrices are quantized, in words, where a checkpoint has several schemes.

Invariants: torch-free.
Knows nothing of where these words are said.
"""

from __future__ import annotations

from stoker_runtime.models.parameter import QUANTIZED
from stoker_runtime.models.quantization.mixed_checkpoint import MixedCheckpoint, Pieces, counted
from stoker_runtime.models.spec import ModelSpec


def mixture(spec: ModelSpec) -> str:
    """How many of a model's matrices are in which scheme; "" where there is one scheme, or none."""
    if not isinstance(spec.checkpoint, MixedCheckpoint):
        return ""
    return counted(spec.pieces_of(each.name) for each in spec.parameters() if each.role in QUANTIZED)


def joined(spec: ModelSpec) -> dict[str, Pieces]:
    """The matrices whose pieces are in several schemes, and so rest in one that holds all of them exactly."""
    return {name: pieces for name, pieces in spec.mixed.items() if len(pieces) > 1}
