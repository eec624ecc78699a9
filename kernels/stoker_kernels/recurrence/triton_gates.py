"""Device functions that the recurrences share: a step of time, and by how much a state fades in it.

Invariants: fp32; exact to a few ulps for steps near zero, of which a state keeps the longest memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    small = grown * (1.0 - 0.5 * grown)
    return tl.where(x > 20.0, x, tl.where(grown < 1e-3, small, tl.log(1.0 + grown)))


@triton.jit
def unit_rows(x):
    """The rows of `x`, each brought to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
