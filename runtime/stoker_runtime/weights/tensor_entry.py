"""Where one tensor of a checkpoint lies: the common ground of the file formats.

Invariants: torch-free; an entry is made only after its bytes were checked to lie within the file.
Knows nothing of headers or of where the tensor goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`num_bytes` at `offset` of `file` encode a row-major tensor of `shape`.

    `encoding` is safetensors' word for the dtype (F32, F16, BF16, F8_E4M3, …) or the name of a GGUF block type.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    encoding: str
