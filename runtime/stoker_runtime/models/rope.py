"""The rotary table: cos and sin of every position, with the scalings of the published long-context methods; and how
queries grow with their position.

Invariants: computed once, in fp32 (the frequencies of yarn's ramp in fp64 on the host); never changes afterwards,
so a position means the same rotation in every step and in every cached page.
Knows nothing of heads or of how the table is applied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker_runtime.models.layer_specs.rope_spec import RopeSpec


def rope_table(rope: RopeSpec, positions: int, device: torch.device) -> Tensor:
    """Cos in the first half of the columns, sin in the second: `[positions, rope.dim]` fp32.

    `positions` is the longest context that will run. For longrope it decides between the short and the long
    factors, and for dynamic the base, as they may not change under keys that are cached already.
    """
    frequencies = inverse_frequencies(rope, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)
    short = rope.short_attention_factor and positions <= rope.original_max_position
    factor = rope.short_attention_factor if short else rope.attention_factor
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def query_growth(rope: RopeSpec, positions: int, device: torch.device) -> Tensor | None:
    """What queries of each position are multiplied with, `[positions, 1, 1]` fp32; None: they stay as they are, as all
    within the trained length do.

    Source: the scaling of queries by length in the published code of Llama 4.
    """
    if not rope.query_growth or positions <= rope.original_max_position:
        return None
    lengths = torch.arange(positions) // rope.original_max_position
    return (1.0 + rope.query_growth * torch.log1p(lengths.float()))[:, None, None].to(device)


def inverse_frequencies(rope: RopeSpec, positions: int) -> Tensor:
    """Radians per position of each rotated pair, `[rope.dim / 2]` fp32."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "factors":
        return base / torch.tensor(rope.short_factor, dtype=torch.float32)
    if rope.kind == "longrope":
        long = positions > rope.original_max_position
        return base / torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
    if rope.kind == "dynamic":
        return 1.0 / (_dynamic_base(rope, positions) ** exponents)
    return base


def _dynamic_base(rope: RopeSpec, positions: int) -> float:
    """Dynamic NTK: up to the trained length the base itself, beyond it the one at which `positions` of them turn the
    slowest pair as far as `factor` times slower positions would."""
    beyond = max(positions / rope.original_max_position, 1.0)
    growth = rope.factor * beyond - (rope.factor - 1.0)
    return float(rope.theta * growth ** (rope.dim / (rope.dim - 2)))


def _llama3(rope: RopeSpec, base: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a linear blend in between."""
    turns = rope.original_max_position * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * base + (1.0 - blend) * base / rope.factor


def _yarn(rope: RopeSpec, base: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071), "NTK by parts": interpolate the dimensions that turn less than beta_slow times
    over the trained length, keep those that turn more than beta_fast times, blend between."""

    def dimension(turns: float) -> float:
        span = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return rope.dim * span / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return base / rope.factor * ramp + base * (1.0 - ramp)
