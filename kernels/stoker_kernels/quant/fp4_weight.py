"""The weight of a linear layer in floats of four bits (e2m1), with a scale of eight bits for each block of columns.

Its value is `e2m1 · block scale · factor of the row`: NVFP4's scales are e4m3 for 16 columns each beside one number for
the matrix, MXFP4's are powers of two (e8m0) for 32 columns each.
Formats: OCP Microscaling Formats (MX) v1.0; NVIDIA's NVFP4.

Invariants: bits stand for the numbers that files have, never rounded again; `scale` is [G, N], so that a kernel reads a
block's for neighbouring rows together; all tensors live on one device. A value of this type is checked once, when it is
made.
Does not know: how a product with it is computed (`fp4_gemm`), nor how a file names its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from stoker_kernels.quant.layout import Layout

Fp4Kind = Literal["nvfp4", "mxfp4"]
FP4_BLOCKS: dict[Fp4Kind, int] = {"nvfp4": 16, "mxfp4": 32}
"""Columns that share a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; 8 to 15 are the same, negative."""


def nearest_e2m1(x: Tensor) -> Tensor:
    """The codes, uint8, of the numbers nearest to x; half-way it is the even code, beyond 6 that of 6."""
    edges = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=x.device)
    below, above = (torch.bucketize(x.abs(), edges, right=right) for right in (False, True))
    size = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return size + 8 * (x < 0).to(torch.uint8)


@dataclass(frozen=True)
class Fp4Weight:
    """Weight [N, K] of y = x · Wᵀ.

    data:   uint8 [N, K / 2]; with `layout` "rows" the lower column in the lower half of a byte; with "fragments" in the
            order of `fragment_gemm.order`; with "pairs" so too, but rows of gate and up in turn: what is stored as 2f
            and 2f + 1, of scales and factors too, are the weight's rows f and N / 2 + f; with "lanes" in the order of
            `lane_gemm.order`.
    scale:  uint8 [K / block, N], the bits of e8m0 (mxfp4) or of e4m3 (nvfp4), which of fragments and pairs are
            positive and widened (`fp4_bits.py`).
    factor: fp32 [N] of nvfp4, the matrix's number; None of mxfp4.
    Raises ValueError naming what does not fit.
    """

    data: Tensor
    scale: Tensor
    factor: Tensor | None
    kind: Fp4Kind
    layout: Layout = "rows"

    def __post_init__(self) -> None:
        if self.kind not in FP4_BLOCKS:
            raise ValueError(f"floats of four bits are {', '.join(FP4_BLOCKS)}, not {self.kind!r}")
        if self.data.dim() != 2 or self.data.dtype != torch.uint8 or not self.data.is_contiguous():
            raise ValueError(f"codes are contiguous uint8 [N, K / 2], not {self.data.dtype} {tuple(self.data.shape)}")
        if self.in_features % self.block:
            raise ValueError(f"{self.in_features} columns fill no whole blocks of {self.block} ({self.kind})")
        groups = (self.in_features // self.block, self.out_features)
        if tuple(self.scale.shape) != groups or self.scale.dtype != torch.uint8 or not self.scale.is_contiguous():
            raise ValueError(f"scales are contiguous uint8 {groups}, not {self.scale.dtype} {tuple(self.scale.shape)}")
        found = None if self.factor is None else (tuple(self.factor.shape), self.factor.dtype)
        wanted = ((self.out_features,), torch.float32) if self.kind == "nvfp4" else None
        if found != wanted:
            raise ValueError(f"the factors of {self.kind} rows are {wanted}, not {found}")

    @property
    def block(self) -> int:
        """Columns that share a scale."""
        return FP4_BLOCKS[self.kind]

    @property
    def takes_quantized(self) -> bool:
        """Whether products read activations in FP8: never."""
        return False

    @property
    def out_features(self) -> int:
        """N."""
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.data.shape[1] * 2
