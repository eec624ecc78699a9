"""Layer norm with weight and bias, alone and with the residual addition before it.

Invariants: fp32 accumulation, one rounding to the result's dtype. Unlike `add_rms_norm` the residual is not written:
an encoder of BERT's kind goes on with the normed sum.
Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

register(
    "layer_norm",
    "triton",
    "stoker_kernels.norm.triton_layer_norm:layer_norm",
    triton_supports(torch.bfloat16, torch.float16, torch.float32),
)
register("layer_norm", "reference", "stoker_kernels.norm.reference:layer_norm", reference_supports)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`(s - mean(s)) / sqrt(var(s) + eps) * weight + bias` with `s = x + residual` (Ba, Kiros & Hinton 2016).

    `x`, `residual`: `[T,H]`; `weight`, `bias`: `[H]`; → `[T,H]`. The sum is taken in fp32. `out` may be `x`.
    """
    y: Tensor = select("layer_norm", x.device, x.dtype)(x, weight, bias, eps, residual=residual, out=out)
    return y
