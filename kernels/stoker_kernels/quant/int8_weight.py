"""The weight of a linear layer in integers of eight bits whose products read activations in eight bits, too (W8A8).

Its value is `data · scale`, a scale for each channel. An activation's row is quantized as it comes: its scale is its
largest magnitude times fp32(1/127), not below MIN_SCALE, its integers are value · fp32(1/scale) rounded to the nearest,
ties to even, within ±127.

Invariants: no zero points, on neither side. A value of this type is checked once, when it is made.
Does not know: how a product with it is computed (`int8_gemm`), nor which file it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Int8Weight:
    """Weight [N, K] of y = x · Wᵀ: data int8 [N, K], contiguous; scale fp32 [N, 1]. Raises ValueError naming what does
    not fit.
    """

    data: Tensor
    scale: Tensor
    kind: Literal["int8_channel"] = "int8_channel"

    def __post_init__(self) -> None:
        if self.data.dim() != 2 or self.data.dtype != torch.int8 or not self.data.is_contiguous():
            raise ValueError(f"integers are contiguous int8 [N, K], not {self.data.dtype} {tuple(self.data.shape)}")
        if tuple(self.scale.shape) != (self.out_features, 1) or self.scale.dtype != torch.float32:
            raise ValueError(
                f"scales are fp32 {(self.out_features, 1)}, not {self.scale.dtype} {tuple(self.scale.shape)}"
            )

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
        return self.data.shape[1]
