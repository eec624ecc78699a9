"""How a linear's weight is held in floats of four bits, NVFP4 or MXFP4, and what that takes of memory.

Invariants: frozen plain data, torch-free; `parts` is what allocation, loading and byte counts all walk.
Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fp4Part = Literal["data", "scale", "factor"]
BLOCKS: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
"""Columns that share a scale, by kind."""
EXPERTS_KIND = "mxfp4_experts"
"""How experts rest that a checkpoint of experts alone in MXFP4 holds, in one tensor for all."""
# A row of theirs is read in steps of so many blocks, and of less at its end, each with so many bytes of scales.
_STEPS, _STEP_SCALES = (8, 4, 2, 1), 8


def experts_sizes(shape: tuple[int, ...], kind: Literal["nvfp4", "mxfp4"]) -> tuple[int, ...]:
    """Bytes of the codes, of the scales and under nvfp4 of the factors of rows of experts, [n, k]."""
    n, k = shape
    blocks = k // BLOCKS[kind]
    steps = blocks // _STEPS[0] + sum(bool(blocks % _STEPS[0] & size) for size in _STEPS[1:])
    found = (n * k // 2, n * steps * _STEP_SCALES)
    return (*found, 4 * n) if kind == "nvfp4" else found


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """Codes of four bits, a scale of eight for each block of columns; under nvfp4 a number for each row besides."""

    kind: Literal["nvfp4", "mxfp4"]

    @property
    def per_word(self) -> int:
        """Columns that share a byte: where a weight may be cut."""
        return 2

    def columns(self, k: int) -> int:
        """Columns of a block of a weight with `k` of them."""
        return min(BLOCKS[self.kind], k)

    def parts(self, n: int, k: int) -> dict[Fp4Part, tuple[tuple[int, int], int]]:
        """Each tensor of an [n, k] weight: its shape, and bytes an element."""
        found: dict[Fp4Part, tuple[tuple[int, int], int]] = {
            "data": ((n, k // 2), 1),
            "scale": ((k // self.columns(k), n), 1),
        }
        if self.kind == "nvfp4":
            found["factor"] = ((1, n), 4)
        return found

    def sizes(self, n: int, k: int, item_bytes: int) -> list[int]:
        """Bytes of each part of an [n, k] weight, whatever the `item_bytes` of the model's dtype."""
        return [rows * columns * size for (rows, columns), size in self.parts(n, k).values()]

    def experts_sizes(self, n: int, k: int, item_bytes: int) -> tuple[int, ...]:
        """As `sizes`, of stacked experts' [n, k] rows, which rest otherwise."""
        return experts_sizes((n, k), self.kind)

    def experts_problem(self, k: int) -> str | None:
        """Why experts with rows of `k` columns are not multiplied in this scheme; None: they are."""
        block = BLOCKS[self.kind]
        return f"rows have {k} columns, no whole blocks of {block}" if k % block else None

    @property
    def experts_block(self) -> int:
        """Columns that rows of experts have whole multiples of."""
        return BLOCKS[self.kind]
