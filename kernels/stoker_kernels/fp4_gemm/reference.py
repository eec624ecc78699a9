"""Products with weights in floats of four bits in plain PyTorch: oracle and CPU backend.

Invariants: the weight is `(e2m1 · block scale) · factor` in fp32, rounded once to the dtype of x; the product is that
of the dtype. Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import E2M1, Fp4Weight, unpack_rows

EXPONENT_BIAS = 127  # of e8m0


def block_scales(weight: Fp4Weight) -> Tensor:
    """The scales of blocks [N, G] in fp32, factors of rows left out."""
    bits = weight.scale.t()
    if weight.kind == "nvfp4":
        return bits.contiguous().view(torch.float8_e4m3fn).float()
    return torch.ldexp(torch.ones(bits.shape, device=bits.device), bits.to(torch.int32) - EXPONENT_BIAS)


def dequantize_fp4(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """The values [N, K] in `dtype`."""
    n, k = weight.out_features, weight.in_features
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=weight.data.device)
    values = table[unpack_rows(weight.data, 4).int()].view(n, k // weight.block, weight.block)
    scaled = values * block_scales(weight).unsqueeze(-1)
    if weight.factor is not None:
        scaled *= weight.factor.view(n, 1, 1)
    return scaled.view(n, k).to(dtype)


def fp4_linear(x: Tensor, weight: Fp4Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    y = torch.nn.functional.linear(x, dequantize_fp4(weight, x.dtype), bias)
    return y if out is None else out.copy_(y)
