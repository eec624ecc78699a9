"""What a start says of a quantized checkpoint: what its weights are in, and what becomes of those that cannot stay so.

Invariants: says, and changes nothing.
Knows nothing of how weights are read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from stoker_runtime.models.mixed_words import joined, mixture
from stoker_runtime.models.quantization.fp4_checkpoint import Fp4Checkpoint
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.quantization.mixed_checkpoint import (
    MixedCheckpoint,
    OneCheckpoint,
    Pieces,
    resting,
    scheme_words,
)
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.packed.load import PackedRoute
from stoker_runtime.weights.routing import Vocabulary, tensor_names

log = logging.getLogger(__name__)


def announce(arena: WeightArena, whole: ModelSpec) -> None:
    """Say how the checkpoint of `whole`, of which the arena may hold a rank's part, is quantized, if it is."""
    checkpoint = arena.spec.checkpoint
    if checkpoint is not None and arena.spec.requantized:
        log.info(
            "weights: %s (%s) become %s at load, matrix by matrix, and so do those that were not quantized",
            checkpoint.described, checkpoint.method, arena.quantization,
        )  # fmt: skip
    elif isinstance(checkpoint, MixedCheckpoint):
        _announce_mixed(checkpoint, whole)
    elif checkpoint is not None:
        _announce_one(checkpoint, arena)
    _announce_experts(arena)


def _announce_mixed(checkpoint: MixedCheckpoint, whole: ModelSpec) -> None:
    log.info("weights: %s, as the checkpoint has them (%s)%s", mixture(whole), checkpoint.method, _aside(checkpoint))
    like: dict[tuple[str, Pieces], list[str]] = {}
    for name, pieces in joined(whole).items():
        like.setdefault((name.rpartition(".")[2], pieces), []).append(name)
    for (_, pieces), (name, *others) in like.items():
        modules = (each.removesuffix(".weight") for each in tensor_names(whole, name, Vocabulary.HF))
        parts = (f"{module} in {scheme_words(each)}" for module, each in zip(modules, pieces, strict=True))
        log.warning(
            "weights: %s%s is one matrix here, of %s: it rests in %s, which holds all of them exactly; parts in one "
            "scheme take less memory",
            name, f" (and {', '.join(others)} likewise)" if others else "", ", ".join(parts),
            scheme_words(resting(pieces)),
        )  # fmt: skip


def _announce_one(checkpoint: OneCheckpoint, arena: WeightArena) -> None:
    if isinstance(checkpoint, IntegerCheckpoint):
        scheme = checkpoint.scheme
        layouts = ", ".join(sorted({weight.layout for weight in arena.integers.values()}))
        log.info(
            "weights: in %d bits as the checkpoint has them (%s, %s%s), laid out in %s",
            scheme.bits, checkpoint.method, scheme.grouping, ", act-order" if scheme.order else "", layouts,
        )  # fmt: skip
        return
    aside = _aside(checkpoint)
    if not isinstance(checkpoint, Fp8Checkpoint):
        keep = f"keep {str(arena.dtype).removeprefix('torch.')}"
        log.info(
            "weights: in %s as the checkpoint has them (%s); activations %s%s",
            checkpoint.described, checkpoint.method,
            keep if isinstance(checkpoint, Fp4Checkpoint) else "are quantized per token", aside,
        )  # fmt: skip
        return
    log.info(
        "weights: in FP8 as the checkpoint has them (%s, %s); activations are quantized per token%s",
        checkpoint.method, checkpoint.kind, aside,
    )  # fmt: skip


def _aside(checkpoint: OneCheckpoint | MixedCheckpoint) -> str:
    """What of the checkpoint is not used, as the end of a line."""
    return f"; not used: {checkpoint.note}" if checkpoint.note else ""


def _announce_experts(arena: WeightArena) -> None:
    if arena.spec.moe is None or not arena.spec.moe.packing:
        return
    dtype = str(arena.dtype).removeprefix("torch.")
    if not arena.experts:
        log.info("weights: experts in MXFP4 become %s, of four times the memory", dtype)
    elif arena.device.type == "cuda":
        log.info("weights: experts in MXFP4 as the checkpoint has them; activations keep %s", dtype)
    else:
        log.info("weights: experts in MXFP4 as the checkpoint has them; each step decodes those that it chooses")


def announce_widened(arena: WeightArena, packed: Mapping[str, tuple[PackedRoute, ...]]) -> None:
    """Say which experts no product reads as the checkpoint has them."""
    widened = [name for name in packed if "experts_" in name and name in arena.dense]
    schemes = [checkpoint.scheme for name in widened if isinstance(
        checkpoint := arena.spec.checkpoint_of(name), IntegerCheckpoint)]  # fmt: skip
    for bits in sorted({scheme.bits for scheme in schemes}):
        dtype, times = str(arena.dtype).removeprefix("torch."), 16 // bits
        log.warning(
            "weights: experts in %d bits become %s, of %d times the memory, because each orders its columns by "
            "activation (act-order, desc_act); a checkpoint without act-order stays in %d bits",
            bits, dtype, times * arena.dtype.itemsize // 2, bits,
        )  # fmt: skip
