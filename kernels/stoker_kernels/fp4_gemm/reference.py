"""Products with weights in floats of four bits in plain PyTorch: the oracle.

Invariants: the weight is `(e2m1 · block scale) · factor` in fp32, rounded once to the dtype of x; the product is that
of the dtype. Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.fragment_gemm import from_fragments
from stoker_kernels.lane_gemm import from_lanes
from stoker_kernels.quant import E2M1, Fp4Weight, unpack_rows, unpair_rows, widened_scales

EXPONENT_BIAS = 127  # of e8m0


def block_scales(weight: Fp4Weight) -> Tensor:
    """The scales of blocks [N, G] in fp32, factors of rows left out."""
    bits = weight.scale.t()
    if weight.kind == "nvfp4":
        bits = bits.contiguous()
        return bits.view(torch.float8_e4m3fn).float() if weight.layout in ("rows", "lanes") else widened_scales(bits)
    return torch.ldexp(torch.ones(bits.shape, device=bits.device), bits.to(torch.int32) - EXPONENT_BIAS)


def codes_of(weight: Fp4Weight) -> Tensor:
    """The codes uint8 [N, K] by stored rows, whatever the order of bytes."""
    if weight.layout == "lanes":
        return from_lanes(weight.data, 4)
    return unpack_rows(weight.data, 4) if weight.layout == "rows" else from_fragments(weight.data, "fp4")


def dequantize_fp4(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """The values [N, K] in `dtype`, gate before up."""
    n, k = weight.out_features, weight.in_features
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=weight.data.device)
    codes = codes_of(weight)
    values = table[codes.int()].view(n, k // weight.block, weight.block)
    scaled = values * block_scales(weight).unsqueeze(-1)
    if weight.factor is not None:
        scaled *= weight.factor.view(n, 1, 1)
    found = scaled.view(n, k).to(dtype)
    return unpair_rows(found) if weight.layout == "pairs" else found


def fp4_linear(x: Tensor, weight: Fp4Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    y = torch.nn.functional.linear(x, dequantize_fp4(weight, x.dtype), bias)
    return y if out is None else out.copy_(y)
