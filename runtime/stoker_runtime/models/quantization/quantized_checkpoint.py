"""Which quantization a checkpoint has, by the `quantization_config` of its config.json.

Invariants: torch-free. A method that is not known is a ModelError that names the known ones.
Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.quantization import fp8_checkpoint
from stoker_runtime.models.quantization.fp4_checkpoint import (
    MODELOPT,
    Fp4Checkpoint,
    read_fp4_compressed,
    read_modelopt,
)
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint, read_float_compressed, read_fp8
from stoker_runtime.models.quantization.int8_checkpoint import Int8Checkpoint, read_int8
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint, read_awq, read_gptq, read_packed

PackedCheckpoint = IntegerCheckpoint | Fp4Checkpoint
"""Those whose weights lie in several tensors each, which `weights/packed/load.py` brings together."""
QuantizedCheckpoint = Fp8Checkpoint | Int8Checkpoint | PackedCheckpoint
PACKED_EXPERTS = "mxfp4"
METHODS = (*fp8_checkpoint.METHODS, "compressed-tensors", "awq", "gptq", MODELOPT)


def read_quantization(
    name: str, config: Mapping[str, Any], *, packed_experts: bool = False
) -> QuantizedCheckpoint | None:
    """The quantization that config.json describes; None without one. Raises ModelError for what is not supported.

    `packed_experts`: experts in MXFP4, and nothing else, become 16 bits when they are loaded, so that none is left.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "unnamed")) if isinstance(given, Mapping) else "unnamed"
    if method == PACKED_EXPERTS and packed_experts:
        return None
    if method not in METHODS:
        raise ModelError(
            f"{name}: checkpoints quantized by {method!r} are not supported; known are {', '.join(METHODS)}. "
            "Serve the 16-bit checkpoint, or a GGUF file.",
            param="quantization_config",
        )
    if method == "awq":
        return read_awq(name, given)
    if method == "gptq":
        return read_gptq(name, given)
    if method == MODELOPT:
        return read_modelopt(name, given)
    ignored = tuple(
        str(module) for key in ("ignored_layers", "modules_to_not_convert", "ignore") for module in given.get(key) or ()
    )
    return _compressed(name, given, ignored) if method == "compressed-tensors" else read_fp8(name, given, ignored)


def _compressed(name: str, given: Mapping[str, Any], ignored: tuple[str, ...]) -> QuantizedCheckpoint | None:
    """compressed-tensors: one group, for all linear layers; none where the KV cache alone was calibrated."""
    groups = list((given.get("config_groups") or {}).values())
    if not groups and given.get("kv_cache_scheme"):
        return None
    if len(groups) != 1 or list(groups[0].get("targets") or []) != ["Linear"]:
        raise ModelError(
            f"{name}: quantization_config's config_groups {len(groups)} groups is not supported; it must be one, with "
            "the target Linear.",
            param="quantization_config",
        )
    weights = groups[0].get("weights") or {}
    form = str(groups[0].get("format") or given.get("format"))
    if weights.get("type") == "float" and weights.get("num_bits") == 4:
        return read_fp4_compressed(name, groups[0], form, ignored)
    if weights.get("type") == "int" and groups[0].get("input_activations") is None:
        return read_packed(name, weights, form, ignored)
    if weights.get("type") == "int":
        return read_int8(name, groups[0], form, ignored)
    return read_float_compressed(name, groups[0], ignored)


def left_dense(checkpoint: QuantizedCheckpoint, parameter: str, modules: Sequence[str]) -> bool:
    """Whether a final tensor made of the weights of `modules` is not quantized. Raises ModelError where some are."""
    left = [checkpoint.leaves(module) for module in modules]
    if any(left) and not all(left):
        mixed = ", ".join(f"{module} {'is not' if out else 'is'}" for module, out in zip(modules, left, strict=True))
        raise ModelError(
            f"{parameter} is one matrix here, of which only a part is quantized: {mixed}.", param="quantization_config"
        )
    return all(left)
