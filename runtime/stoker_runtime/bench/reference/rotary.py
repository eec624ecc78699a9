"""Rotations of positions once more, pair by pair in Python's own numbers: a part of the oracle `reference.model`.

Invariants: shares only `RopeSpec` with the engine; angles are made in 64 bits.
Knows nothing of tables that live on a device. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071, appendix
A), the published code of Llama 3.1, LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker_runtime.models.layer_specs.rope_spec import RopeSpec


def rotations(rope: RopeSpec, count: int, longest: int, device: torch.device) -> Tensor:
    """Cos, then sin, of positions `0 … count - 1` of a model run up to `longest`: `[count, rope.dim]` fp32."""
    turning = [_radians(rope, pair, longest) for pair in range(rope.dim // 2)]
    angles = torch.arange(count, dtype=torch.float64)[:, None] * torch.tensor(turning, dtype=torch.float64)
    factor = rope.attention_factor
    if rope.short_attention_factor and longest <= rope.original_max_position:
        factor = rope.short_attention_factor
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).float().to(device)


def _radians(rope: RopeSpec, pair: int, longest: int) -> float:
    """How far `pair` turns from one position to the next."""
    plain = math.pow(rope.theta, -2.0 * pair / rope.dim)
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "dynamic":
            stretched = rope.theta * math.pow(_growth(rope, longest), rope.dim / (rope.dim - 2.0))
            return math.pow(stretched, -2.0 * pair / rope.dim)
        case "llama3":
            return _by_wavelength(rope, plain)
        case "yarn":
            kept = _kept(rope, pair)
            return kept * plain + (1.0 - kept) * plain / rope.factor
        case "factors":
            return plain / rope.short_factor[pair]
        case "longrope":
            factors = rope.long_factor if longest > rope.original_max_position else rope.short_factor
            return plain / factors[pair]
    return plain


def _growth(rope: RopeSpec, longest: int) -> float:
    return max(1.0, 1.0 + rope.factor * (longest - rope.original_max_position) / rope.original_max_position)


def _by_wavelength(rope: RopeSpec, plain: float) -> float:
    """Llama 3.1: waves that fit the trained length often are kept, those that hardly do are stretched."""
    wavelength = 2.0 * math.pi / plain
    if wavelength < rope.original_max_position / rope.high_freq_factor:
        return plain
    if wavelength > rope.original_max_position / rope.low_freq_factor:
        return plain / rope.factor
    smooth = rope.original_max_position / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1.0 - smooth) * plain / rope.factor + smooth * plain


def _kept(rope: RopeSpec, pair: int) -> float:
    """YaRN: the share of a pair's own frequency, by how often the pairs around it turn over the trained length."""

    def pair_that_turns(times: float) -> float:
        return rope.dim / 2.0 * math.log(rope.original_max_position / (2.0 * math.pi * times), rope.theta)

    fast, slow = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0.0), min(slow, rope.dim - 1.0)
    if pair <= fast:
        return 1.0
    return max(0.0, 1.0 - (pair - fast) / (slow - fast)) if slow > fast else 0.0
