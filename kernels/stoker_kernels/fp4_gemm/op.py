"""`fp4_linear`: y = x · Wᵀ + bias for weights in NVFP4 or MXFP4 and activations of 16 or 32 bits.

Implementations, for `--kernel fp4_linear=NAME`: `own` (CUDA: our Hopper kernels for weights
in fragments, Triton for those in rows), `compiled` (C, on the CPU) and `reference`.
Invariants: each row of the result depends on its own row of x alone; nothing synchronises with the host.
Does not know: which layer it serves, nor how weights reached the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels import lane_gemm
from stoker_kernels.fragment_gemm import fills_blocks, fragments_refusal
from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight, Layout

_FLOATS = (torch.bfloat16, torch.float16)
register("fp4_linear", "own", "stoker_kernels.fp4_gemm.choose:fp4_linear", triton_supports(*_FLOATS))
register("fp4_linear", "compiled", "stoker_kernels.fp4_gemm.cpu:fp4_linear", lane_gemm.supports)
register("fp4_linear", "reference", "stoker_kernels.fp4_gemm.reference:fp4_linear", reference_supports)


def fp4_linear(x: Tensor, weight: Fp4Weight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, K] float, weight [N, K] → [T, N] of x's dtype; bias [N]; `out` is written and returned where given.

    Raises ValueError for shapes that do not fit, KernelUnavailable where nothing takes x's dtype.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(x.shape)}, the weight [N, K] = {(weight.out_features, weight.in_features)}")
    y: Tensor = select("fp4_linear", x.device, x.dtype)(x, weight, bias=bias, out=out)
    return y


def best_layout(
    n: int, k: int, kind: Fp4Kind, dtype: torch.dtype, device: torch.device, *, gated: bool = False
) -> Layout:
    """How codes of an [n, k] weight should rest on `device` for products of `dtype`; `gated`: it is gate and up."""
    if not fills_blocks(n, k, FP4_BLOCKS[kind]) or fragments_refusal(dtype, device, "fp4"):
        return "rows"
    return "pairs" if gated else "fragments"
