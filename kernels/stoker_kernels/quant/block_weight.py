"""The weight of a linear layer in the blocks of a GGUF file, as the file has them, or in planes.

Invariants: `data` of a piece is whole rows of whole blocks; pieces follow each other in the rows of the weight, each in
a format of its own; all are in planes, or none. A value of this type is checked once, when it is made.
Does not know: what a block means (`block_gemm`), nor which file it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from stoker_kernels.quant.block_planes import PlaneRows

# Name → (columns of a block, its bytes). The order is that of KINDS in block_gemm/csrc/cpu_blocks.c.
BLOCK_FORMATS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


def block_row_bytes(name: str, columns: int) -> int:
    """Bytes of a row. Raises ValueError for a format that is not known, or columns that fill no whole blocks."""
    if name not in BLOCK_FORMATS:
        raise ValueError(f"{name} is no block format; there are {', '.join(BLOCK_FORMATS)}")
    width, size = BLOCK_FORMATS[name]
    if columns % width:
        raise ValueError(f"rows of {columns} fill no whole blocks of {width} ({name})")
    return columns // width * size


@dataclass(frozen=True)
class BlockRows:
    """Neighbouring rows in one format: uint8 [rows, row bytes], contiguous.

    `packed`: sixteen rows lie side by side in as many bytes, as `launch/csrc/cpu_packed_order.h` says.
    """

    format: str
    data: Tensor
    packed: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return self.data.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.data.device


@dataclass(frozen=True)
class BlockWeight:
    """Weight [N, K] of y = x · Wᵀ. Raises ValueError naming what does not fit."""

    pieces: tuple[BlockRows, ...] | tuple[PlaneRows, ...]
    in_features: int
    kind: Literal["blocks"] = "blocks"

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if isinstance(piece, PlaneRows):
                if piece.columns != self.in_features:
                    raise ValueError(f"{piece.format} planes of {piece.columns} columns, not of {self.in_features}")
                continue
            wanted = block_row_bytes(piece.format, self.in_features)
            data = piece.data
            if data.dim() != 2 or data.shape[1] != wanted or data.dtype != torch.uint8 or not data.is_contiguous():
                raise ValueError(
                    f"{piece.format} rows of {self.in_features} are contiguous uint8 [N, {wanted}], "
                    f"not {data.dtype} {tuple(data.shape)}"
                )

    @property
    def takes_quantized(self) -> bool:
        """Whether products read activations in FP8: never."""
        return False

    @cached_property
    def packed(self) -> bool:
        """Whether all of it is packed for the processor."""
        return not self.in_planes and all(piece.packed for piece in self.blocks)

    @cached_property
    def out_features(self) -> int:
        """N."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def in_planes(self) -> bool:
        """Whether the pieces are in planes."""
        return isinstance(self.pieces[0], PlaneRows)

    @property
    def planes(self) -> tuple[PlaneRows, ...]:
        """The pieces, where they are in planes."""
        return tuple(piece for piece in self.pieces if isinstance(piece, PlaneRows))

    @cached_property
    def blocks(self) -> tuple[BlockRows, ...]:
        """The pieces, where they are as a file has them."""
        return tuple(piece for piece in self.pieces if isinstance(piece, BlockRows))

    @property
    def device(self) -> torch.device:
        """Where the blocks lie."""
        return self.pieces[0].device
