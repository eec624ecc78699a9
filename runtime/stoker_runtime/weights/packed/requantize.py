"""Checkpoints that are quantized already and become something else at load, as `--isq` says.

Invariants: pure and torch-free. What a matrix becomes is what its numbers, rounded to the model's type, would become.
Knows nothing of files, nor of how numbers are rounded (`weights/load.py`, `weights/packed/load.py`, `WeightArena`).
"""

from __future__ import annotations

from dataclasses import replace

from stoker_runtime.config import EngineConfig
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.quantized_checkpoint import parts_of
from stoker_runtime.models.spec import ModelSpec


def requantized(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """`spec`, its quantized matrices to become what `isq` says; as it is where they are that already."""
    already = config.isq == "fp8" and all(isinstance(each, Fp8Checkpoint) for each in parts_of(spec.checkpoint))
    return spec if config.isq == "none" or spec.checkpoint is None or already else replace(spec, requantized=True)


def as_stored(spec: ModelSpec) -> ModelSpec:
    """`spec` with the matrices as the checkpoint has them."""
    return replace(spec, requantized=False, blocks={}) if spec.requantized else spec
