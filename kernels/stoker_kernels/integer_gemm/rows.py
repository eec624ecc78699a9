"""`integer_linear` on a CPU where a row's bits do not depend on the batch.

Invariants: sums as of `launch/cpu_dot.py`, of weights as the reference dequantizes them; one rounding at the end.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.integer_gemm.reference import dequantize_integers
from stoker_kernels.launch.cpu_dot import dot
from stoker_kernels.quant import IntegerWeight


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    dense = dequantize_integers(weight, x.dtype)
    y = dot(x, dense if dense.dtype is torch.bfloat16 else dense.float())
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)
