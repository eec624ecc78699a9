"""The weight of a linear layer: its numbers, its scales and what kind of weight it is.

Invariants: `data` is [N, K], row-major (K contiguous), and `scale` has exactly the shape that `kind`
asks for; both live on one device. A value of this type is checked once, when it is made; kernels need not.
Does not know: how a product with it is computed (`gemm`), nor how it was quantized (`quant`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

WeightKind = Literal["dense", "fp8_channel", "fp8_tensor", "fp8_block"]
WEIGHT_KINDS: tuple[WeightKind, ...] = get_args(WeightKind)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # fp8_block: one scale per BLOCK × BLOCK weights


def scale_shape(kind: WeightKind, n: int, k: int) -> tuple[int, int] | None:
    """Shape of `scale` for an [n, k] weight of this kind; None where there is no scale."""
    if kind == "dense":
        return None
    if kind == "fp8_channel":
        return (n, 1)
    if kind == "fp8_tensor":
        return (1, 1)
    if kind == "fp8_block":
        return (-(-n // BLOCK), -(-k // BLOCK))
    raise ValueError(f"unknown weight kind {kind!r}; known: {', '.join(WEIGHT_KINDS)}")


@dataclass(frozen=True)
class LinearWeight:
    """Weight of y = x · dataᵀ; its value is `data * scale`, `scale` spread over its channel or block.

    data:  [N, K], K contiguous; a float dtype for `dense`, float8_e4m3fn otherwise.
    scale: None for `dense`; fp32 [N, 1], [1, 1] or [⌈N/128⌉, ⌈K/128⌉] for `fp8_channel`, `fp8_tensor` or
           `fp8_block`.
    packed: `data` once more, in the order in which a CPU's GEMM reads it (`gemm.cpu.onednn`); None where it has none.
    Raises ValueError when data, scale and kind do not fit together.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    kind: WeightKind = "dense"
    packed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.dim() != 2 or self.data.stride(1) != 1:
            raise ValueError(f"a linear weight is [N, K] with K contiguous, not {tuple(self.data.shape)} "
                             f"with strides {self.data.stride()}")
        expected = scale_shape(self.kind, *self.data.shape)
        if expected is None:
            if self.scale is not None or self.data.dtype == FP8:
                raise ValueError("a dense weight has a 16- or 32-bit float dtype and no scale")
            return
        if self.data.dtype != FP8:
            raise ValueError(f"{self.kind} weights are float8_e4m3fn, not {self.data.dtype}")
        if self.scale is None or tuple(self.scale.shape) != expected or self.scale.dtype != torch.float32:
            got = None if self.scale is None else (tuple(self.scale.shape), self.scale.dtype)
            raise ValueError(f"the scale of an {self.kind} weight {tuple(self.data.shape)} is fp32 "
                             f"{expected}, not {got}")
        if self.scale.device != self.data.device:
            raise ValueError(f"scale on {self.scale.device}, data on {self.data.device}")

    @property
    def takes_quantized(self) -> bool:
        """Whether products read activations in FP8."""
        return self.kind != "dense"

    @property
    def out_features(self) -> int:
        """N."""
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.data.shape[1]
