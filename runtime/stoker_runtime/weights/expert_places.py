"""Where the stacked experts of a layer rest in four bits, and how rows come there.

Invariants: a place is two views of the arena, whole experts one behind the other; what is stored is laid out as the
products read it (`moe`), on the device of the views.
Knows nothing of files and names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stoker_kernels.moe import ExpertKind, pack_int4, pack_mxfp4, quantize_mxfp4
from stoker_kernels.quant import quantize_integers

# Values of a matrix that are rounded to integers together: in fp32 64 MiB.
ROUNDED_AT_ONCE = 1 << 24
MIDDLE = 8.0
"""The zero point of codes that have none."""


@dataclass(frozen=True)
class Mxfp4Experts:
    """Codes uint8 [E, rows, K / 2] and scales uint8 [E, steps, rows, 8] of experts in MXFP4."""

    data: Tensor
    scale: Tensor
    kind: ClassVar[ExpertKind] = "mxfp4"
    group: ClassVar[int] = 0

    def store(self, expert: int, blocks: Tensor, scales: Tensor) -> None:
        """Lay out an expert as files have it: codes uint8 [rows, K / 2], exponents uint8 [rows, K / 32].

        Raises ValueError for a scale that is too large.
        """
        packed = pack_mxfp4(blocks, scales)
        self.data[expert].copy_(packed[0])
        self.scale[expert].copy_(packed[1])

    def quantize(self, whole: Tensor) -> None:
        """Round all experts, [E · rows, K] in 16 or 32 bits."""
        for expert, matrix in enumerate(whole.chunk(self.data.shape[0])):
            self.store(expert, *quantize_mxfp4(matrix))


@dataclass(frozen=True)
class IntegerExperts:
    """Codes uint8 [E, rows, K / 2] and, of the model's type, scales beside zero points [E, groups, rows, 2].

    `group`: columns that share them, 0: the whole row.
    """

    data: Tensor
    scale: Tensor
    group: int
    kind: ClassVar[ExpertKind] = "int4"

    def store(self, row: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Lay out rows of one expert, from `row` of all experts' on: uint8 codes [rows, K], scales and zero points
        [groups, rows].
        """
        expert, first = divmod(row, self.data.shape[1])
        rows = slice(first, first + codes.shape[0])
        self.data[expert, rows].copy_(pack_int4(codes))
        self.scale[expert, :, rows, 0].copy_(scale)
        if zero is None:
            self.scale[expert, :, rows, 1] = MIDDLE
        else:
            self.scale[expert, :, rows, 1].copy_(zero)

    def quantize(self, whole: Tensor) -> None:
        """Round all experts, [E · rows, K] in 16 or 32 bits."""
        rows, columns = self.data.shape[1], whole.shape[1]
        together = max(1, ROUNDED_AT_ONCE // columns)
        for begin in range(0, whole.shape[0], rows):
            for row in range(begin, begin + rows, together):
                part = whole[row : min(row + together, begin + rows)]
                self.store(row, *quantize_integers(part, 4, self.group or columns))


ExpertPlace = Mxfp4Experts | IntegerExperts
