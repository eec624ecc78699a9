"""`integer_linear`: y = x · Wᵀ + bias for weights in integers of 4 or 8 bits with scales a group.

Implementations, for `--kernel integer_linear=NAME`: `own` (CUDA: our Hopper kernels for weights in fragments, Triton
for those in rows), `compiled` (C, on the CPU) and `reference`. Where batch invariance is demanded: `fixed`, and `rows`.
Invariants: each row of the result depends on its own row of x alone; nothing synchronises with the host.
Does not know: which layer it serves, nor how weights reached the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels import lane_gemm
from stoker_kernels.fragment_gemm import fills_blocks, fragments_refusal
from stoker_kernels.launch import cpu_dot
from stoker_kernels.launch.dispatch import (
    Target,
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)
from stoker_kernels.quant import IntegerWeight, Layout

_FLOATS = (torch.bfloat16, torch.float16)
register("integer_linear", "own", "stoker_kernels.integer_gemm.choose:integer_linear", triton_supports(*_FLOATS))
register("integer_linear", "compiled", "stoker_kernels.integer_gemm.cpu:integer_linear", lane_gemm.supports)
register("integer_linear", "reference", "stoker_kernels.integer_gemm.reference:integer_linear", reference_supports)


def _rows_support(target: Target) -> str | None:
    return cpu_supports(torch.bfloat16, torch.float32)(target) or cpu_dot.refusal()


register_invariant(
    "integer_linear", "fixed", "stoker_kernels.integer_gemm.fixed:integer_linear",
    triton_supports(torch.bfloat16, min_sm=90),
)  # fmt: skip
register_invariant("integer_linear", "rows", "stoker_kernels.integer_gemm.rows:integer_linear", _rows_support)


def integer_linear(
    x: Tensor, weight: IntegerWeight, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [T, K] float, weight [N, K] → [T, N] of x's dtype; bias [N]; `out` is written and returned where given.

    Raises ValueError for shapes or dtypes that do not fit, KernelUnavailable where nothing takes x's dtype.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(x.shape)}, the weight [N, K] = {(weight.out_features, weight.in_features)}")
    y: Tensor = select("integer_linear", x.device, x.dtype)(x, weight, bias=bias, out=out)
    return y


def best_layout(
    n: int, k: int, bits: int, group: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False
) -> Layout:
    """How codes of an [n, k] weight should rest on `device` for products of `dtype`; `gated`: it is gate and up."""
    if not fills_blocks(n, k, group) or fragments_refusal(dtype, device, "int4" if bits == 4 else "int8"):
        return "rows"
    return "pairs" if gated else "fragments"
