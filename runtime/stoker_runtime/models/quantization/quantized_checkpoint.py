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
    modelopt_settings,
    read_fp4_compressed,
    read_modelopt,
)
from stoker_runtime.models.quantization.fp8_checkpoint import read_float_compressed, read_fp8
from stoker_runtime.models.quantization.int8_checkpoint import read_int8
from stoker_runtime.models.quantization.integer_checkpoint import (
    LEFT_OUT,
    IntegerCheckpoint,
    read_awq,
    read_gptq,
    read_packed,
)
from stoker_runtime.models.quantization.mixed_checkpoint import (
    MixedCheckpoint,
    OneCheckpoint,
    Pieces,
    alike,
    scheme_words,
)
from stoker_runtime.models.quantization.mixed_settings import (
    MIXED,
    read_dynamic,
    read_groups,
    read_layers,
    targets_linear,
)

PackedCheckpoint = IntegerCheckpoint | Fp4Checkpoint
"""Those whose weights lie in several tensors each, which `weights/packed/load.py` brings together."""
QuantizedCheckpoint = OneCheckpoint | MixedCheckpoint
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
        changed = any(not str(pattern).startswith(LEFT_OUT) for pattern in given.get("dynamic") or {})
        return read_dynamic(name, given) if changed else read_gptq(name, given)
    if method == MODELOPT:
        settings, left = modelopt_settings(given)
        return read_layers(name, settings, left) if settings.get("quant_algo") == MIXED else read_modelopt(name, given)
    ignored = tuple(
        str(module) for key in ("ignored_layers", "modules_to_not_convert", "ignore") for module in given.get(key) or ()
    )
    return _compressed(name, given, ignored) if method == "compressed-tensors" else read_fp8(name, given, ignored)


def _compressed(name: str, given: Mapping[str, Any], ignored: tuple[str, ...]) -> QuantizedCheckpoint | None:
    """compressed-tensors: groups of linears; none where the KV cache alone was calibrated."""
    groups = list((given.get("config_groups") or {}).values())
    if not groups and given.get("kv_cache_scheme"):
        return None
    if not groups:
        raise ModelError(
            f"{name}: quantization_config has no config_groups, which say how weights are quantized.",
            param="quantization_config",
        )
    targets = [[str(target) for target in group.get("targets") or ()] for group in groups]
    if len(groups) == 1 and targets_linear(targets[0]):
        return _group(name, given, groups[0], ignored)
    found = [_group(name, given, group, ()) for group in groups]
    return read_groups(name, list(zip(targets, found, strict=True)), ignored)


def _group(
    name: str, given: Mapping[str, Any], group: Mapping[str, Any], ignored: tuple[str, ...]
) -> OneCheckpoint:
    """The scheme of one group. Raises ModelError for what is not supported."""
    weights = group.get("weights") or {}
    form = str(group.get("format") or given.get("format"))
    if weights.get("type") == "float" and weights.get("num_bits") == 4:
        return read_fp4_compressed(name, group, form, ignored)
    if weights.get("type") == "int" and group.get("input_activations") is None:
        return read_packed(name, weights, form, ignored)
    if weights.get("type") == "int":
        return read_int8(name, group, form, ignored)
    return read_float_compressed(name, group, ignored)


def parts_of(checkpoint: QuantizedCheckpoint | None) -> Pieces:
    """All schemes of a checkpoint; nothing without one."""
    if checkpoint is None:
        return ()
    return checkpoint.parts if isinstance(checkpoint, MixedCheckpoint) else (checkpoint,)


def scheme_of(checkpoint: QuantizedCheckpoint, module: str) -> OneCheckpoint | None:
    """How the weight of `module` is quantized; None: not at all."""
    if isinstance(checkpoint, MixedCheckpoint):
        return checkpoint.of(module)
    return None if checkpoint.leaves(module) else checkpoint


def pieces_of(checkpoint: QuantizedCheckpoint, parameter: str, modules: Sequence[str], *, experts: bool) -> Pieces:
    """How the weights of `modules`, of which a final tensor is made, are quantized: one scheme for all, or integers in
    one for each, unless they are `experts`; nothing where none is. Raises ModelError for a mix that no matrix holds.
    """
    found = {module: scheme_of(checkpoint, module) for module in modules}
    kept = [each for each in found.values() if each is not None]
    if not kept:
        return ()
    if len(kept) < len(found):
        mixed = ", ".join(f"{module} {'is not' if each is None else 'is'}" for module, each in found.items())
        raise ModelError(
            f"{parameter} is one matrix here, of which only a part is quantized: {mixed}.", param="quantization_config"
        )
    if all(alike(kept[0], each) for each in kept):
        return (kept[0],)
    if not experts and all(isinstance(each, IntegerCheckpoint) for each in kept):
        orders = {each.scheme.order for each in kept if isinstance(each, IntegerCheckpoint)}
        if len(orders) == 1:
            return tuple(kept)
    # Of many experts the first in each scheme.
    first: dict[str, str] = {}
    for module, each in zip(found, kept, strict=True):
        first.setdefault(scheme_words(each) if experts else module, f"{module} in {scheme_words(each)}")
    mixed = ", ".join(first.values())
    known = "one scheme for all of its parts" + (
        "" if experts else ", or integers of 4 and 8 bits for each, all with act-order or none"
    )
    raise ModelError(
        f"{parameter} is one matrix here, whose parts are in schemes that no matrix holds together: {mixed}; "
        f"supported is {known}.",
        param="quantization_config",
    )
