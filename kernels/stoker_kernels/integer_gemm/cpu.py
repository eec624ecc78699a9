"""`integer_linear` on a CPU: weights that lie sixteen rows side by side by `lane_gemm`, all others by the reference.

Invariants: of packed weights no number is rounded before it is summed. Knows nothing of dispatch.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels import lane_gemm
from stoker_kernels.integer_gemm import reference
from stoker_kernels.quant import IntegerWeight


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    if weight.layout != "lanes":
        return reference.integer_linear(x, weight, bias=bias, out=out)
    return lane_gemm.multiply(x if weight.order is None else x.index_select(1, weight.order), weight, bias, out)
