"""Where one tensor of a checkpoint lies: the common ground of the file formats.

Invariants: torch-free; an entry is made only after its bytes were checked to lie within the file.
Knows nothing of headers or of where the tensor goes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker_runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`num_bytes` at `offset` of `file` encode a row-major tensor of `shape`.

    `encoding` is safetensors' word for the dtype (F32, F16, BF16, F8_E4M3, …) or the name of a GGUF block type.
    Of a window of a larger tensor, as some columns of a matrix, runs of `run` bytes begin `stride` bytes apart (0: all
    bytes follow each other), and the first `lead` numbers of each run's blocks are not part of it.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    encoding: str
    stride: int = 0
    lead: int = 0
    run: int = 0


def find_entry(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...], architecture: str) -> TensorEntry:
    """The entry called `name`. Raises ModelError where it is missing, with the nearest name, or has another shape."""
    entry = entries.get(name)
    if entry is None:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f" The nearest is {close[0]}." if close else ""
        raise ModelError(f"The checkpoint lacks tensor {name} {list(shape)} of a {architecture}.{hint}")
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: tensor {name} is {list(entry.shape)}; the configuration asks for {list(shape)}."
        )
    return entry
