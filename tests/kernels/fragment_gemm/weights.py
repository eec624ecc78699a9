"""Random weights in fragments, of every form of numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from stoker_kernels.fp4_gemm import dequantize_fp4, store_fp4
from stoker_kernels.fragment_gemm import Numbers, to_fragments
from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight, IntegerWeight, integer_scale_shape

FragmentWeight = IntegerWeight | Fp4Weight


def random_weight(
    numbers: Numbers, n: int, k: int, group: int, zeros: bool, generator: torch.Generator
) -> FragmentWeight:
    """Scales keep products near one. `group` and `zeros` are of integers."""
    if numbers.form == "fp4":
        return random_floats("mxfp4" if numbers.name == "mxfp4" else "nvfp4", n, k, generator)
    bits = 8 if numbers.form == "int8" else 4
    shape = integer_scale_shape(n, k, group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(shape, generator=generator) + 0.5) * (3.2 / (1 << bits) / k**0.5)
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator) if zeros else None
    return IntegerWeight(to_fragments(codes, numbers.form), scale.bfloat16(), zero, bits, group, layout="fragments")


def random_floats(kind: Fp4Kind, n: int, k: int, generator: torch.Generator) -> Fp4Weight:
    """Any codes; scales of either sign, zero, and numbers below the normal ones among them."""
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    shape, factor = (k // FP4_BLOCKS[kind], n), None
    if kind == "mxfp4":
        scale = torch.randint(115, 125, shape, dtype=torch.uint8, generator=generator)
        scale[torch.rand(shape, generator=generator) < 0.05] = 0  # 2^-127
    else:
        scale = torch.randint(0, 64, shape, dtype=torch.uint8, generator=generator)
        scale |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) << 7
        factor = (torch.rand(n, generator=generator) + 0.1) * 0.3
    place = Fp4Weight(
        torch.zeros_like(data), torch.zeros_like(scale), None if factor is None else torch.zeros(n), kind, "fragments"
    )
    store_fp4(place, 0, data, scale, factor)
    return place


def stored_values(weight: FragmentWeight, dtype: torch.dtype) -> torch.Tensor:
    """The values of stored rows, as they lie, in `dtype`."""
    plain = replace(weight, layout="fragments")
    return dequantize_fp4(plain, dtype) if isinstance(plain, Fp4Weight) else dequantize_integers(plain, dtype)
