"""Products in integers of eight bits in plain PyTorch: oracle and CPU backend.

Invariants: integers are summed exactly; scales and bias are applied in fp32, and the result is rounded once.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import Int8Weight, Quantized, quantize_int8


def int8_linear(x: Tensor | Quantized, weight: Int8Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else quantize_int8(x)
    if data.device.type == "cpu":
        sums = torch._int_mm(data, weight.data.t()).float()
    else:
        # A GPU's product of integers wants shapes of its own; in fp64 every sum is exact.
        sums = (data.double() @ weight.data.double().t()).float()
    y = sums * scale * weight.scale.t()
    if bias is not None:
        y += bias.float()
    dtype = torch.bfloat16 if isinstance(x, Quantized) else x.dtype
    return y.to(dtype) if out is None else out.copy_(y)
