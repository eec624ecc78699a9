"""How configurations say that layers are quantized in several schemes: compressed-tensors by the targets of several
groups, GPTQ by `dynamic`, ModelOpt by MIXED_PRECISION.

Invariants: torch-free. A rule under which the stored numbers would mean something else is a ModelError that names it.
Knows nothing of tensors, nor of what a single scheme's settings are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.models.quantization.fp4_checkpoint import MODELOPT, read_modelopt
from stoker_runtime.models.quantization.integer_checkpoint import LEFT_OUT, read_gptq
from stoker_runtime.models.quantization.mixed_checkpoint import MixedCheckpoint, OneCheckpoint
from stoker_runtime.models.quantization.refusal import refused

LINEAR = "Linear"
"""The class of modules by which compressed-tensors means all linears."""
REGEX = "re:"
CHANGED = "+:"
"""What may stand before the pattern of modules that GPTQ's `dynamic` gives other settings."""
OVERRIDES = ("bits", "group_size", "sym", "desc_act")
UNREAD = ("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "mse")
"""What `dynamic` may say besides, of how weights were found."""
MIXED = "MIXED_PRECISION"
ALGORITHMS: dict[tuple[object, object, object], str] = {
    (4, "float", 16): "NVFP4", (4, "float", 32): "MXFP4", (8, "float", None): "FP8",
}  # fmt: skip
"""ModelOpt's algorithm of a group's bits, type and group size."""


def targets_linear(targets: Sequence[str]) -> bool:
    """Whether a group of compressed-tensors is of all linears."""
    return list(targets) == [LINEAR]


def read_groups(
    name: str, groups: Sequence[tuple[Sequence[str], OneCheckpoint]], ignored: tuple[str, ...]
) -> MixedCheckpoint:
    """compressed-tensors' groups: the targets of each, and its scheme. Full names go before regular expressions, and
    these before the class Linear. Raises ModelError for a target of another kind, or one that two schemes have.
    """
    parts = _distinct([part for _, part in groups])
    found: dict[str, int] = {}
    for targets, part in groups:
        if not targets:
            raise refused(name, "config_groups", "a group without targets", "of targets")
        for target in targets:
            if not target.startswith(REGEX) and target != LINEAR and "." not in target:
                raise refused(
                    name, "target", target, f"{LINEAR}, a linear's full name, or {REGEX} before a regular expression"
                )
            if found.setdefault(target, parts.index(part)) != parts.index(part):
                raise refused(name, "target", target, "of one group, or of groups in one scheme")
    rest = found.pop(LINEAR, None)
    patterns = [(_pattern(name, target), part) for target, part in found.items() if target.startswith(REGEX)]
    named = {target: part for target, part in found.items() if not target.startswith(REGEX)}
    return MixedCheckpoint("compressed-tensors", parts, named, tuple(patterns), rest, ignored, single=True)


def read_dynamic(name: str, given: Mapping[str, Any]) -> MixedCheckpoint:
    """GPTQ's `dynamic`: the first pattern that matches leaves a module out (`-:`) or gives it other settings. Raises
    ModelError for settings that are not supported.
    """
    uniform = {key: value for key, value in given.items() if key != "dynamic"}
    found: list[tuple[str, OneCheckpoint | None]] = []
    for pattern, changes in (given.get("dynamic") or {}).items():
        if pattern.startswith(LEFT_OUT):
            found.append((_pattern(name, pattern.removeprefix(LEFT_OUT)), None))
            continue
        unknown = [key for key in changes if key not in (*OVERRIDES, *UNREAD)]
        if unknown:
            raise refused(name, f"dynamic {pattern}", unknown[0], f"one of {', '.join((*OVERRIDES, *UNREAD))}")
        own = read_gptq(name, {**uniform, **changes, "modules_to_not_convert": None})
        found.append((_pattern(name, pattern.removeprefix(CHANGED)), own))
    base = read_gptq(name, {**uniform, "modules_to_not_convert": None})
    parts = _distinct([base, *(part for _, part in found if part is not None)])
    patterns = tuple((pattern, None if part is None else parts.index(part)) for pattern, part in found)
    left = given.get("modules_to_not_convert") or ()
    ignored = tuple(each if each.startswith(REGEX) else f"{REGEX}.*{re.escape(each)}" for each in map(str, left))
    return MixedCheckpoint("gptq", parts, {}, patterns, parts.index(base), ignored)


def read_layers(name: str, settings: Mapping[str, Any], ignored: tuple[str, ...]) -> MixedCheckpoint:
    """ModelOpt's `quantized_layers`, or the targets of its groups: an algorithm for each module. Raises ModelError for
    algorithms that are not supported, and where there are neither.
    """
    layers: dict[str, Mapping[str, Any]] = dict(settings.get("quantized_layers") or {})
    for group in () if layers else (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        algorithm = ALGORITHMS.get((weights.get("num_bits"), weights.get("type"), weights.get("group_size")))
        if algorithm is None:
            raise refused(name, "config_groups", dict(weights), f"of {', '.join(ALGORITHMS.values())}")
        layers |= {str(target): {"quant_algo": algorithm} for target in group.get("targets") or ()}
    if not layers:
        raise refused(name, "quantized_layers", None, f"there with {MIXED}")
    kinds = ("quant_algo", "group_size")
    of = {each: tuple(layer.get(key) for key in kinds) for each, layer in layers.items()}
    read: dict[tuple[Any, ...], OneCheckpoint] = {}
    for module, found in of.items():
        if "." not in module or module.startswith(REGEX):
            raise refused(name, "target", module, f"a linear's full name with {MIXED}")
        if found not in read:
            read[found] = read_modelopt(name, dict(zip(kinds, found, strict=True)))
    parts = _distinct(list(read.values()))
    named = {module: parts.index(read[found]) for module, found in of.items()}
    return MixedCheckpoint(MODELOPT, parts, named, ignored=ignored, within=True)


def _distinct(parts: Sequence[OneCheckpoint]) -> tuple[OneCheckpoint, ...]:
    return tuple(dict.fromkeys(parts))


def _pattern(name: str, target: str) -> str:
    """A regular expression, checked. Raises ModelError."""
    found = target.removeprefix(REGEX)
    try:
        re.compile(found)
    except re.error as error:
        raise refused(name, "pattern", target, f"a regular expression ({error})") from error
    return found
