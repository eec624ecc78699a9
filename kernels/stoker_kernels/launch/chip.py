"""What a GPU of a compute capability has, as far as kernels are chosen by it: the one description that choosers read.

Invariants: pure, no torch and no driver: a start, a compiler without a GPU and a test see the same. A capability that
stands in no table has the least of its generation, so that what is chosen for it fits.
Knows nothing of what any op computes, nor of how fast a chip is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

LEAST_SM, BF16_SM, FP8_SM, PDL_SM = 75, 80, 89, 90
WGMMA_SM = 90  # alone: what is newer multiplies by other instructions
# KiB of shared memory that one block may have, by the CUDA programming guide's table of capabilities.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
LARGE_KIB = 160


@dataclass(frozen=True, slots=True)
class Chip:
    """A compute capability, as major · 10 + minor, and the shared memory that a block may have, in bytes."""

    sm: int
    shared_bytes: int

    @property
    def bf16(self) -> bool:
        """Tensor cores multiply bfloat16; below, float16 alone."""
        return self.sm >= BF16_SM

    @property
    def fp8(self) -> bool:
        """Tensor cores multiply e4m3, and instructions convert to and from it."""
        return self.sm >= FP8_SM

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch: a kernel may start while its predecessor drains."""
        return self.sm >= PDL_SM

    @property
    def wgmma(self) -> bool:
        """Products of a warpgroup, which the kernels in CUDA are made of, with TMA and clusters: SM 9.0 alone."""
        return self.sm == WGMMA_SM

    @property
    def large_shared(self) -> bool:
        """Room for the tiles and the deep rings of a chip for data centres."""
        return self.shared_bytes >= LARGE_KIB * 1024


HOPPER_SHARED = SHARED_KIB[WGMMA_SM] * 1024
"""Bytes of shared memory that one block of SM 9.0 may have: for the kernels that are made for it alone."""


@functools.cache
def chip_of(sm: int) -> Chip:
    """The chip of capability `sm`: 86 for 8.6."""
    kib = SHARED_KIB.get(sm)
    if kib is None:
        kib = min((known for other, known in SHARED_KIB.items() if other // 10 == sm // 10), default=99)
    return Chip(sm, kib * 1024)
