"""Quantization to fp8 in plain PyTorch: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.quant.types import Quantized


def quantize_fp8(x: Tensor) -> Quantized:
    """fp8 with one scale a token."""
    return Quantized.of(x.float())
