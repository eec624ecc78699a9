"""How a matrix rests in GGUF's blocks, those of its file or made at load: the rows that share a format, their bytes.

Invariants: frozen plain data, torch-free. Knows nothing of what a block means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PLANE_SCRATCH = 128 << 20
"""Bytes of rows in 16 bits that a product with planes takes at most beside its result."""
PLANE_SUMS = 32 << 20
"""Bytes of sums of parts of K that it takes at most in their place, or of rows on a kind of GPU that is not Hopper."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Neighbouring rows of a final matrix in one format; `planes` are the bytes of its planes, where a GPU has it."""

    format: str
    rows: int
    row_bytes: int
    planes: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows, as they rest."""
        return sum(self.planes) if self.planes else self.rows * self.row_bytes


def scratch_bytes(
    blocks: Mapping[str, Sequence[BlockPart]], shapes: Mapping[str, tuple[int, ...]], item_bytes: int
) -> int:
    """Bytes that products with the planes among `blocks` take beside their results, in a type of `item_bytes`: sums of
    parts of K, or the rows of the largest of `shapes`; 0 without planes.
    """
    in_planes = {name for name, parts in blocks.items() if any(part.planes for part in parts)}
    largest = max((math.prod(shape) for name, shape in shapes.items() if name in in_planes), default=0)
    return max(PLANE_SUMS, min(PLANE_SCRATCH, largest * item_bytes)) if in_planes else 0
