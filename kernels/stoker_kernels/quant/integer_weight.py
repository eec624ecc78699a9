"""The weight of a linear layer in integers of 4 or 8 bits, with a scale and a zero point for each group of columns.

Its value is `(code - zero) · scale`. GPTQ, AWQ and compressed-tensors checkpoints become this, whatever their files
look like.

Invariants: `scale` and `zero` are [G, N], so that a kernel reads a group's for neighbouring rows together; all tensors
live on one device. A value of this type is checked once, when it is made.
Does not know: how a product with it is computed (`integer_gemm`), nor how a file packs its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stoker_kernels.quant.layout import Layout

IntegerKind = Literal["int4", "int8"]
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class IntegerWeight:
    """Weight [N, K] of y = x · Wᵀ, columns in groups of `group` neighbours.

    data:   uint8 [N, K · bits / 8]; with `layout` "rows" row by row, the lower column in the lower half of a byte; with
            "fragments" the same codes in the order of `fragment_gemm.order`; with "pairs" so too, but rows of gate and
            up in turn: what is stored as 2f and 2f + 1, of scales too, are the weight's rows f and N / 2 + f; with
            "lanes" in the order of `lane_gemm.order`.
    scale:  [⌈K / group⌉, N] of a 16- or 32-bit float dtype.
    zero:   uint8 [⌈K / group⌉, N], or None: 8 of 4 bits, 128 of 8.
    order:  int32 [K] or None: column k of the weight belongs to column `order[k]` of x.
    Raises ValueError naming what does not fit.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    order: Tensor | None = None
    layout: Layout = "rows"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group < 1:
            raise ValueError(f"integer weights have 4 or 8 bits and groups of 1 or more, not {self.bits}, {self.group}")
        if self.data.dim() != 2 or self.data.dtype != torch.uint8 or not self.data.is_contiguous():
            raise ValueError(
                f"codes are contiguous uint8 [N, K · bits / 8], not {self.data.dtype} {tuple(self.data.shape)}"
            )
        if tuple(self.scale.shape) != self.groups or self.scale.dtype not in SCALE_DTYPES:
            raise ValueError(f"scales are floats {self.groups}, not {self.scale.dtype} {tuple(self.scale.shape)}")
        if self.zero is not None and (tuple(self.zero.shape) != self.groups or self.zero.dtype != torch.uint8):
            raise ValueError(f"zero points are uint8 {self.groups}, not {self.zero.dtype} {tuple(self.zero.shape)}")
        if self.order is not None and (self.order.shape != (self.in_features,) or self.order.dtype != torch.int32):
            raise ValueError(
                f"the order is int32 [{self.in_features}], not {self.order.dtype} {tuple(self.order.shape)}"
            )

    @property
    def kind(self) -> IntegerKind:
        """What a linear of this kind is called beside `LinearWeight.kind`."""
        return "int4" if self.bits == 4 else "int8"

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
        return self.data.shape[1] * 8 // self.bits

    @property
    def groups(self) -> tuple[int, int]:
        """The shape of `scale` and `zero`."""
        return integer_scale_shape(self.out_features, self.in_features, self.group)

    @property
    def middle(self) -> int:
        """The zero point where `zero` is None."""
        return 1 << (self.bits - 1)


def integer_scale_shape(n: int, k: int, group: int) -> tuple[int, int]:
    """Shape of scales and zero points of an [n, k] weight in groups of `group` columns."""
    return (-(-k // group), n)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [N, K] → `data` of the layout "rows"."""
    if bits == 8:
        return codes.contiguous()
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_rows(data: Tensor, bits: int) -> Tensor:
    """`data` of the layout "rows" → uint8 codes [N, K]."""
    if bits == 8:
        return data
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(1)


def quantize_integers(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A float weight [N, K] rounded to integers → uint8 codes [N, K], fp32 scales [G, N], uint8 zero points [G, N].

    Each group's least and greatest value, or 0 where that lies beyond, become codes 0 and 2^bits - 1, to within half a
    step (round to nearest, as GPTQ's paper calls it).
    """
    n, k = weight.shape
    groups, most = -(-k // group), (1 << bits) - 1
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - k)).view(n, groups, group)
    low, high = padded.amin(-1).clamp_max(0.0), padded.amax(-1).clamp_min(0.0)
    scale = ((high - low) / most).clamp_min(1e-8)
    zero = (-low / scale).round().clamp_(0, most)
    codes = (padded / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, most)
    return codes.to(torch.uint8).view(n, -1)[:, :k], scale.t(), zero.to(torch.uint8).t()
