"""How a matrix rests in the blocks of its GGUF file: the rows that share a format, and their bytes.

Invariants: frozen plain data, torch-free. Knows nothing of what a block means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Neighbouring rows of a final matrix in one format."""

    format: str
    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows * self.row_bytes
