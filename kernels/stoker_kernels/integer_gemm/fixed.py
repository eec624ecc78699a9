"""`integer_linear` on a GPU where a row's bits do not depend on the batch: one cut of K, for any number of tokens.

Four bits in fragments go through the kernels that bring tokens to shared memory, also where there are few; how many
CTAs share the columns follows from the weight. Other weights have one Triton tile. More than PORTION tokens are so many
launches.
Invariants: a weight's columns are cut by its own shape and the GPU's SMs, and each part is summed in the order of its
columns by one instruction; parts are added in their order.
Does not know: which layer it serves, nor what is faster where any bits will do (`choose.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.integer_gemm import sm90_int4, triton_integer
from stoker_kernels.integer_gemm.sm90_int4 import TILES
from stoker_kernels.quant import IntegerWeight

LEAST = min(tile.tokens for tile in TILES if tile.groups)  # tokens of a kernel that brings them to shared memory
TOKENS = triton_integer.TOKEN_TILES[-1]
PORTION = 1024  # tokens of a launch


def integer_linear(x: Tensor, weight: IntegerWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias. Raises ValueError where a weight in fragments meets operands that its kernels do not take."""
    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if len(x) == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.layout == "rows":
        triton_integer.multiply(x, weight, bias, y, tokens=TOKENS)
        return y
    reason = sm90_int4.refusal(x, weight, bias, y)
    if reason is not None:
        raise ValueError(f"integer_linear of a weight in fragments: {reason}")
    _, split = sm90_int4.choice(LEAST, weight, x.device)
    for first in range(0, len(x), PORTION):
        part = slice(first, min(first + PORTION, len(x)))
        tile, _ = sm90_int4.choice(max(LEAST, part.stop - part.start), weight, x.device, split)
        sm90_int4.multiply(x[part], weight, bias, y[part], tile, split)
    return y
