"""Reads the rotary embedding of a configuration: `rope_parameters`, or `rope_theta` with `rope_scaling`.

Invariants: torch-free; defaults that the field computes from others (attention factors, original lengths) are
resolved here, so a RopeSpec holds numbers only. An unknown scaling is a ModelError that names the known ones.
Knows nothing of tables; the algorithms are in `rope.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.spec import RopeSpec

# Names that older configurations use for the same scaling.
ALIASES = {"su": "longrope"}
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rotary embedding that `config` describes for heads of `head_dim`."""
    parameters = _merged_parameters(config)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(
            f"rope scaling {kind!r} is not supported; known are {', '.join(KINDS)}.", param="rope_type"
        )
    dim = int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))
    theta = float(parameters.get("rope_theta") or 10000.0)
    if kind in ("default", "dynamic"):
        return RopeSpec(dim=dim, theta=theta, kind=kind)
    if kind == "factors":
        return RopeSpec(dim=dim, theta=theta, kind=kind, short_factor=_factors(parameters, "factors", dim))
    original = int(
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    factor = float(parameters.get("factor") or config["max_position_embeddings"] / original)
    scaled = {"dim": dim, "theta": theta, "kind": kind, "factor": factor, "original_max_position": original}
    if kind == "llama3":
        return RopeSpec(
            **scaled,
            low_freq_factor=float(_required(parameters, "low_freq_factor")),
            high_freq_factor=float(_required(parameters, "high_freq_factor")),
        )
    if kind == "yarn":
        return RopeSpec(
            **scaled,
            attention_factor=_yarn_attention_factor(parameters, factor),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
        )
    if kind == "longrope":
        return RopeSpec(
            **scaled,
            attention_factor=_longrope_attention_factor(parameters, factor, original),
            short_factor=_factors(parameters, "short_factor", dim),
            long_factor=_factors(parameters, "long_factor", dim),
        )
    return RopeSpec(**scaled)


def max_position(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """The longest context: `max_position_embeddings`, or what YaRN stretches the trained length to if longer."""
    configured = int(config["max_position_embeddings"])
    if rope.kind == "yarn":
        return max(configured, int(rope.factor * rope.original_max_position))
    return configured


def _merged_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
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
        raise ModelError(
            f"{key} has {len(values)} values; {dim // 2} rotated pairs need one each.", param=key
        )
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


def _longrope_attention_factor(parameters: Mapping[str, Any], factor: float, original: int) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
