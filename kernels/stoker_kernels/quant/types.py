"""The one type that quantized activations travel in, apart so that producers and consumers import no kernels.

Invariants: `data` is `[T,K]` fp8 e4m3, `scale` is `[T,1]` fp32; the value is `data * scale`.
Knows nothing of how either was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FP8_MAX = 448.0
# The smallest scale a token can get: an all-zero row must not divide by zero.
MIN_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations in fp8 with one fp32 scale a token: `x ≈ data.float() * scale`."""

    data: Tensor
    scale: Tensor
