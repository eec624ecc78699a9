"""A rotary embedding by numbers.

Invariants: plain data without torch; what the field computes from other settings is computed already.
Knows nothing of configurations, nor of tables: the algorithms are in `models/rope.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the base, the rotated dimensions of a head, and the scaling of its frequencies.

    `kind` is default, linear, dynamic, llama3, yarn, longrope or factors (explicit divisors, in `short_factor`).
    `attention_factor` multiplies cos and sin; `short_attention_factor` (0: the same) where longrope takes its short
    factors. `interleaved`: neighbouring dimensions of a head turn together, not those
    half of `dim` apart. Fields a kind does not use keep their defaults.
    `query_growth` g: a query at position p is 1 + g·ln(1 + ⌊p / original_max_position⌋) times as large; 0: as it is.
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    short_attention_factor: float = 0.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    query_growth: float = 0.0
