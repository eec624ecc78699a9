"""GGUF's blocks as a GPU reads them: planes of code bits, and the scales of neighbouring rows together.

A row of K columns is cut into steps of 256 columns, and what is left into tails of 64. The codes of a step have
`places`: place p is the columns p · W to p · W + W - 1, W = `words`, which share a scale. A plane holds some bits of
each code; its element w (16 bits, or 8 where a step has no more of them) holds those of column w of several places, the
first place in the lowest bits. So one shift and one mask bring out W neighbouring columns. A tail has four places of 16
columns, whatever W is; columns beyond K have the code 0.

`scale` is words of 64 bits [steps, words of a step, N], then those of tails. A word holds eight scales of a byte, or
four fp16 numbers, by place; those that are taken off stand in words behind. `factor` [steps, N] is the block's two fp16
numbers that such bytes are multiplied with, the second one in the upper half.
Invariants: what a row takes follows from its format and K alone, within 6% of the bytes in the file for whole steps.
Does not know: how blocks are brought here, nor how they are multiplied (`block_gemm`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEP, TAIL = 256, 64
TAIL_PLACES = 4
PLANE_ALIGNMENT = 16  # bytes: what one copy of a thread brings


@dataclass(frozen=True, slots=True)
class PlaneKind:
    """A code is `low` bits of one plane and `high` of another; its value is code - offset, or a level of IQ4.

    `bytes_`: scales are bytes that fp16 numbers of the step multiply, else fp16 themselves; `mins`: something is taken
    off the product; `nibbles`: both share a byte.
    """

    low: int
    high: int
    words: int
    offset: int
    bytes_: bool
    mins: bool = False
    nibbles: bool = False
    levels: bool = False

    @property
    def places(self) -> int:
        """Places of a step."""
        return STEP // self.words

    @property
    def scale_words(self) -> int:
        """Words of 64 bits with the scales of a step's row, those taken off among them."""
        each = self.places // 8 if self.bytes_ else self.places // 4
        return each * (2 if self.mins and not self.nibbles else 1)

    @property
    def tail_words(self) -> int:
        """The same of a tail: fp16 of four places."""
        return 2 if self.mins else 1


PLANE_KINDS = {
    "Q8_0": PlaneKind(4, 4, 32, 128, False),
    "Q4_0": PlaneKind(4, 0, 32, 8, False),
    "Q4_1": PlaneKind(4, 0, 32, 0, False, mins=True),
    "Q5_0": PlaneKind(4, 1, 32, 16, False),
    "Q5_1": PlaneKind(4, 1, 32, 0, False, mins=True),
    "IQ4_NL": PlaneKind(4, 0, 32, 0, False, levels=True),
    "IQ4_XS": PlaneKind(4, 0, 32, 0, True, levels=True),
    "Q2_K": PlaneKind(2, 0, 16, 0, True, mins=True, nibbles=True),
    "Q3_K": PlaneKind(2, 1, 16, 4, True),
    "Q4_K": PlaneKind(4, 0, 32, 0, True, mins=True),
    "Q5_K": PlaneKind(4, 1, 32, 0, True, mins=True),
    "Q6_K": PlaneKind(4, 2, 16, 32, True),
}
"""By the name of a block format."""


def steps_and_tails(columns: int) -> tuple[int, int]:
    """How many whole steps a row has, and how many tails."""
    return columns // STEP, -(-(columns % STEP) // TAIL)


def element_bits(bits: int, words: int) -> int:
    """Bits of an element of a plane that has `bits` of each code."""
    return min(16, STEP // words * bits)


def plane_row_bytes(bits: int, words: int, columns: int) -> int:
    """Bytes of a row of a plane."""
    steps, tails = steps_and_tails(columns)
    return steps * STEP * bits // 8 + tails * TAIL // TAIL_PLACES * element_bits(bits, words) // 8


def plane_sizes(name: str, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Bytes of `low`, `high`, `scale` and `factor` of rows in a format, each filled up to PLANE_ALIGNMENT."""
    kind = PLANE_KINDS[name]
    steps, tails = steps_and_tails(columns)
    sizes = (
        rows * plane_row_bytes(kind.low, kind.words, columns),
        rows * plane_row_bytes(kind.high, kind.words, columns) if kind.high else 0,
        8 * rows * (steps * kind.scale_words + tails * kind.tail_words),
        4 * rows * steps if kind.bytes_ else 0,
    )
    low, high, scale, factor = (-(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT for size in sizes)
    return low, high, scale, factor


@dataclass(frozen=True)
class PlaneRows:
    """Neighbouring rows in one format: planes uint8 [N, row bytes], `scale` int64 [words], `factor` int32 [steps, N];
    all contiguous, None where the format has none.
    """

    format: str
    columns: int
    low: Tensor
    high: Tensor | None
    scale: Tensor
    factor: Tensor | None

    def __post_init__(self) -> None:
        kind, rows = PLANE_KINDS[self.format], self.low.shape[0]
        steps, tails = steps_and_tails(self.columns)
        words = rows * (steps * kind.scale_words + tails * kind.tail_words)
        wanted = {
            "low": (torch.uint8, (rows, plane_row_bytes(kind.low, kind.words, self.columns))),
            "high": (torch.uint8, (rows, plane_row_bytes(kind.high, kind.words, self.columns))) if kind.high else None,
            "scale": (torch.int64, (words,)),
            "factor": (torch.int32, (steps, rows)) if kind.bytes_ else None,
        }
        for field, form in wanted.items():
            tensor = getattr(self, field)
            found = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
            if found != form or (tensor is not None and not tensor.is_contiguous()):
                raise ValueError(f"{field} of {self.format} planes is contiguous {form}, not {found}")

    @property
    def rows(self) -> int:
        """N."""
        return self.low.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.low.device


def place_planes(name: str, rows: int, columns: int, storage: Tensor) -> PlaneRows:
    """Views into uint8 [sum of `plane_sizes`] for rows in a format; nothing is written."""
    kind, (steps, tails) = PLANE_KINDS[name], steps_and_tails(columns)
    low, high, scale, factor = storage.split(plane_sizes(name, rows, columns))
    low_bytes, high_bytes = (plane_row_bytes(bits, kind.words, columns) for bits in (kind.low, kind.high))
    words = rows * (steps * kind.scale_words + tails * kind.tail_words)
    return PlaneRows(
        name,
        columns,
        low[: rows * low_bytes].view(rows, low_bytes),
        high[: rows * high_bytes].view(rows, high_bytes) if kind.high else None,
        scale[: 8 * words].view(torch.int64),
        factor[: 4 * rows * steps].view(torch.int32).view(steps, rows) if kind.bytes_ else None,
    )
