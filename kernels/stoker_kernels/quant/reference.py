"""Quantization to fp8 in plain PyTorch: oracle and CPU backend.

Invariants: values are clamped before they are converted, because torch's conversion gives NaN beyond the range.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant.types import FP8_MAX, MIN_SCALE, Quantized


def quantize_fp8(x: Tensor) -> Quantized:
    """fp8 with one scale a token."""
    return quantized(x.float())


def quantized(value: Tensor) -> Quantized:
    """fp8 of an fp32 `value` with one scale a token."""
    scale = (value.abs().amax(-1, keepdim=True) * (1.0 / FP8_MAX)).clamp_min(MIN_SCALE)
    data = (value * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Quantized(data, scale)
