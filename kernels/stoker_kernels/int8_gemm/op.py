"""`int8_linear`: y = x · Wᵀ + bias, both sides in integers of eight bits, x quantized a row as it comes or before.

Implementations, for `--kernel int8_linear=NAME`: `own` (CUDA: Triton) and `reference`, which is also the CPU's.
Invariants: sums of integers are exact, so that each row of the result depends on its own row of x alone, and every
implementation finds the same sums; nothing synchronises with the host.
Does not know: which layer it serves, nor how weights reached the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.quant import Int8Weight, Quantized

_FLOATS = (torch.bfloat16, torch.float16)
# Triton 3.6 multiplies integers of eight bits from Ampere on.
_takes = triton_supports(*_FLOATS, min_sm=80)
register("int8_linear", "own", "stoker_kernels.int8_gemm.triton_int8:int8_linear", _takes)
register("int8_linear", "reference", "stoker_kernels.int8_gemm.reference:int8_linear", reference_supports)


def int8_linear(
    x: Tensor | Quantized, weight: Int8Weight, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [T, K] float, weight [N, K] → [T, N] of x's dtype; bias [N]; `out` is written and returned where given.

    A quantized x holds int8; of one the result is bfloat16, or of `out`'s type. Raises ValueError for shapes that do
    not fit, KernelUnavailable where nothing takes x's dtype.
    """
    data = checked_rows(x, weight)
    dtype = data.dtype if isinstance(x, Tensor) else torch.bfloat16 if out is None else out.dtype
    y: Tensor = select("int8_linear", data.device, dtype)(x, weight, bias=bias, out=out)
    return y


def checked_rows(x: Tensor | Quantized, weight: Int8Weight) -> Tensor:
    """What x holds, [T, K]. Raises ValueError where it does not fit the weight."""
    data, shape = x.data if isinstance(x, Quantized) else x, (weight.out_features, weight.in_features)
    if isinstance(x, Quantized) and data.dtype != torch.int8:
        raise ValueError(f"x is quantized to {data.dtype}, but {weight.kind} weights take integers")
    if data.dim() != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(data.shape)}, the weight [N, K] = {shape}")
    return data
