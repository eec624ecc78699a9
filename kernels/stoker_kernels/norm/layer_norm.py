"""Layer norm, alone and with the residual addition before it, with or without a bias.

Invariants: fp32 accumulation, one rounding to the result's dtype. `add_layer_norm` writes the residual, rounded, and
norms what it wrote; `layer_norm` does not: an encoder of BERT's kind goes on with the normed sum.
Knows nothing of models: a `1 + weight` convention is folded into the weight when it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import (
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

for _op in ("layer_norm", "add_layer_norm"):
    register(
        _op,
        "triton",
        f"stoker_kernels.norm.triton_layer_norm:{_op}",
        triton_supports(*_FLOATS),
        invariant=True,
    )
    register(_op, "reference", f"stoker_kernels.norm.reference:{_op}", reference_supports)
    register_invariant(_op, "rows", f"stoker_kernels.norm.rows:{_op}", cpu_supports(*_FLOATS))


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(s - mean(s)) / sqrt(var(s) + eps) * weight + bias` with `s = x + residual` (Ba, Kiros & Hinton 2016).

    `x`, `residual`: `[T,H]`; `weight`, `bias`: `[H]`; → `[T,H]`. The sum is taken in fp32. `out` may be `x`.
    """
    y: Tensor = select("layer_norm", x.device, x.dtype)(x, weight, bias, eps, residual=residual, out=out)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    also: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`residual [T,H] += x [T,H] + also [T,H]` in place, then the norm of the rounded sum → `[T,H]`. `out` may be `x`.

    `also` is what a second branch gives, where attention and feed-forward read the same stream.
    """
    y: Tensor = select("add_layer_norm", x.device, x.dtype)(x, residual, weight, bias, eps, also=also, out=out)
    return y
