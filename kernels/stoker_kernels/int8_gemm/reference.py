"""Products in integers of eight bits in plain PyTorch: oracle and CPU backend.

Invariants: integers are summed exactly; scales and bias are applied in fp32, and the result is rounded once.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import Int8Weight, quantize_int8


def int8_linear(x: Tensor, weight: Int8Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    data, scale = quantize_int8(x)
    if x.device.type == "cpu":
        sums = torch._int_mm(data, weight.data.t()).float()
    else:
        # A GPU's product of integers wants shapes of its own; in fp64 every sum is exact.
        sums = (data.double() @ weight.data.double().t()).float()
    y = sums * scale * weight.scale.t()
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)
