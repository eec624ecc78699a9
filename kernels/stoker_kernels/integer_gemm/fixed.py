"""`integer_linear` on a GPU where a row's bits do not depend on the batch: one cut of K, for any number of tokens.

Four bits in fragments go through the kernels that bring tokens to shared memory, also where there are few; how many
CTAs share the columns follows from the weight. Other weights have one Triton tile. More tokens than a kernel takes are
multiplied in portions.
Invariants: a weight's columns are cut by its own shape and the GPU's SMs, and each part is summed in the order of its
columns by one instruction; parts are added in their order.
Does not know: which layer it serves, nor what is faster where any bits will do (`choose.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.integer_gemm import sm90_int4, triton_integer
from stoker_kernels.integer_gemm.sm90_int4 import MAX_TOKENS, TILES
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.quant import IntegerWeight

WIDE = tuple(tile for tile in TILES if tile.stages)
TOKENS = triton_integer.TOKEN_TILES[-1]


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
    least = WIDE[0]
    split = sm90_int4.split_for(least, least.tokens, weight.out_features, weight.in_features, sm_count(x.device))
    for first in range(0, len(x), MAX_TOKENS):
        part = slice(first, min(first + MAX_TOKENS, len(x)))
        count = part.stop - part.start
        tile = next((each for each in WIDE if count <= each.tokens), WIDE[-1])
        sm90_int4.multiply(x[part], weight, bias, y[part], tile, split)
    return y
