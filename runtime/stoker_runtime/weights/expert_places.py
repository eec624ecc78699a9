"""Where the stacked experts of a layer rest in four bits, and how rows come there.

Invariants: a place is some views of the arena, whole experts one behind the other; what is stored is laid out as the
products read it (`moe`), on the device of the views.
Knows nothing of files and names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stoker_kernels.moe import ExpertKind, pack_int4, pack_mxfp4, pack_nvfp4, quantize_mxfp4, quantize_nvfp4
from stoker_kernels.quant import quantize_integers

# Values of a matrix that are rounded, or laid out, together: in 32 bits 64 MiB.
ROUNDED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Fp4Experts:
    """Codes uint8 [E, rows, K / 2] and scales uint8 [E, steps, rows, 8] of experts in MXFP4 or NVFP4; of these factors
    fp32 [E, rows] as well.
    """

    data: Tensor
    scale: Tensor
    factor: Tensor | None = None
    group: ClassVar[int] = 0

    @property
    def kind(self) -> ExpertKind:
        """As which the products read them."""
        return "mxfp4" if self.factor is None else "nvfp4"

    @property
    def together(self) -> int:
        """Experts that are laid out at once: as many as have ROUNDED_AT_ONCE values."""
        return max(1, ROUNDED_AT_ONCE // (2 * self.data[0].numel()))

    def store(self, expert: int, blocks: Tensor, scales: Tensor, factor: Tensor | None = None) -> None:
        """Lay out some experts, from `expert` on, as files have them: codes uint8 [n · rows, K / 2], scales' bits uint8
        [n · rows, K / block], factors fp32 [n · rows].

        Raises ValueError for a scale that is too large or no number.
        """
        data, moved = (pack_mxfp4 if self.factor is None else pack_nvfp4)(blocks, scales)
        rows = self.data.shape[1]
        experts = slice(expert, expert + len(blocks) // rows)
        self.data[experts].copy_(data.view(-1, rows, data.shape[1]))
        self.scale[experts].copy_(moved.view(len(moved), -1, rows, moved.shape[2]).transpose(0, 1))
        if self.factor is not None and factor is not None:
            self.factor[experts].copy_(factor.view(-1, rows))

    def quantize(self, whole: Tensor) -> None:
        """Round all experts, [E · rows, K] in 16 or 32 bits."""
        for expert, matrix in enumerate(whole.chunk(self.data.shape[0])):
            if self.factor is None:
                self.store(expert, *quantize_mxfp4(matrix))
            else:
                blocks, scales, factor = quantize_nvfp4(matrix)
                self.store(expert, blocks, scales, factor.expand(len(matrix)))


@dataclass(frozen=True)
class IntegerExperts:
    """Codes uint8 [E, rows, K / 2] of four bits, or [E, rows, K] of eight, and, of the model's type, scales beside zero
    points [E, groups, rows, 2].

    `group`: columns that share them, 0: the whole row.
    """

    data: Tensor
    scale: Tensor
    group: int
    bits: int = 4
    factor: ClassVar[None] = None

    @property
    def kind(self) -> ExpertKind:
        """As which the products read them."""
        return "int4" if self.bits == 4 else "int8"

    def store(self, row: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Lay out rows of one expert, from `row` of all experts' on: uint8 codes [rows, K], scales and zero points
        [groups, rows].
        """
        expert, first = divmod(row, self.data.shape[1])
        rows = slice(first, first + codes.shape[0])
        self.data[expert, rows].copy_(pack_int4(codes) if self.bits == 4 else codes)
        self.scale[expert, :, rows, 0].copy_(scale)
        if zero is None:
            # Codes without zero points stand around the middle.
            self.scale[expert, :, rows, 1] = float(1 << self.bits - 1)
        else:
            self.scale[expert, :, rows, 1].copy_(zero)

    def quantize(self, whole: Tensor) -> None:
        """Round all experts, [E · rows, K] in 16 or 32 bits."""
        rows, columns = self.data.shape[1], whole.shape[1]
        together = max(1, ROUNDED_AT_ONCE // columns)
        for begin in range(0, whole.shape[0], rows):
            for row in range(begin, begin + rows, together):
                part = whole[row : min(row + together, begin + rows)]
                self.store(row, *quantize_integers(part, self.bits, self.group or columns))


ExpertPlace = Fp4Experts | IntegerExperts
