"""Reads the rotary embedding of a configuration: `rope_parameters`, or `rope_theta` with `rope_scaling`.

Invariants: torch-free; defaults that the field computes from others (attention factors, original lengths) are
resolved here, so a RopeSpec holds numbers only. An unknown scaling is a ModelError that names the known ones.
Knows nothing of tables; the algorithms are in `rope.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec

# Names that older configurations use for the same scaling. Of text alone, M-RoPE's three positions are one.
ALIASES = {"su": "longrope", "mrope": "default"}
# Whose `factor` says how many times the trained length a context may be.
STRETCHING = ("linear", "dynamic", "yarn")
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rotary embedding that `config` describes for heads of `head_dim`."""
    parameters = merged_parameters(config)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported; known are {', '.join(KINDS)}.", param="rope_type")
    dim = int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))
    rope = RopeSpec(dim=dim, theta=float(parameters.get("rope_theta") or 10000.0), kind=kind)
    if kind == "default":
        return rope
    if kind == "factors":
        return replace(rope, short_factor=_factors(parameters, "factors", dim))
    trained = int(
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    factor = float(parameters.get("factor") or config["max_position_embeddings"] / trained)
    return _with_scaling(replace(rope, factor=factor, original_max_position=trained), parameters)


def _with_scaling(rope: RopeSpec, parameters: Mapping[str, Any]) -> RopeSpec:
    """`rope` with the parameters that its own kind of scaling reads."""
    if rope.kind == "llama3":
        return replace(
            rope,
            low_freq_factor=float(_required(parameters, "low_freq_factor")),
            high_freq_factor=float(_required(parameters, "high_freq_factor")),
        )
    if rope.kind == "yarn":
        return replace(
            rope,
            attention_factor=_yarn_attention_factor(parameters, rope.factor),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
        )
    if rope.kind == "longrope":
        return replace(
            rope,
            attention_factor=_longrope_attention_factor(parameters, rope),
            short_factor=_factors(parameters, "short_factor", rope.dim),
            long_factor=_factors(parameters, "long_factor", rope.dim),
        )
    return rope


def max_position(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """The longest context: `max_position_embeddings`, or what the scaling stretches the trained length to if longer."""
    configured = int(config["max_position_embeddings"])
    if rope.kind in STRETCHING:
        return max(configured, int(rope.factor * rope.original_max_position))
    return configured


def merged_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of rotation, wherever it says it."""
    merged: dict[str, Any] = {
        key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None
    }
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{key} is {value!r}; it must be an object.", param=key)
        merged.update({name: entry for name, entry in value.items() if entry is not None})
    return merged


def _required(parameters: Mapping[str, Any], key: str) -> Any:
    if key not in parameters:
        raise ModelError(f"rope scaling {parameters.get('rope_type')!r} needs {key!r}.", param=key)
    return parameters[key]


def _factors(parameters: Mapping[str, Any], key: str, dim: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in _required(parameters, key))
    if len(values) != dim // 2:
        raise ModelError(f"{key} has {len(values)} values; {dim // 2} rotated pairs need one each.", param=key)
    return values


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Section 3.4 of the YaRN paper, with DeepSeek's `mscale` variant."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(float(mscale)) / scale(float(mscale_all_dim))
    return scale(1.0)


def _longrope_attention_factor(parameters: Mapping[str, Any], rope: RopeSpec) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position))
