"""The one type that quantized activations travel in, apart so that producers and consumers import no kernels.

Invariants: `data` is `[T,K]` fp8 e4m3 or int8, as the weight that it is for reads; `scale` is `[T,1]` fp32; the value
is `data * scale`.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
INT8_MAX = 127.0
# The smallest scale a token can get: an all-zero row must not divide by zero.
MIN_SCALE = 1e-12


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of integers, in plain PyTorch: floats [T, K] → int8 [T, K] and fp32 scales [T, 1]."""
    values = x.float()
    scale = (values.abs().amax(-1, keepdim=True) * (1.0 / INT8_MAX)).clamp_min(MIN_SCALE)
    return (values * scale.reciprocal()).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations in eight bits with one fp32 scale a token: `x ≈ data.float() * scale`."""

    data: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor, into: torch.dtype = torch.float8_e4m3fn) -> Quantized:
        """The definition, in plain PyTorch: fp32 `values [T,K]` with one scale a token, for references and oracles.

        Clamped before the conversion, which in torch gives NaN beyond the range of e4m3. `into` may be int8.
        """
        if into == torch.int8:
            return cls(*quantize_int8(values))
        scale = (values.abs().amax(-1, keepdim=True) * (1.0 / FP8_MAX)).clamp_min(MIN_SCALE)
        data = (values * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return cls(data, scale)
