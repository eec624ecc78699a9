"""Reads the header of a GGUF model, in one file or in parts: its metadata and where each tensor lies.

Invariants: needs neither torch nor numpy nor the gguf package, so that the API process can read a tokenizer with
it; tensor data is not touched. A header that is returned is whole: every tensor lies within its file, and of a split
model no part and no tensor is missing. Raises ModelError naming the file, and byte counts where it is cut short.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Knows nothing of what metadata keys and tensors mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
READ_BYTES = 4 * 1024 * 1024
STRING_TYPE, ARRAY_TYPE = 8, 9
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"

# Metadata value type → struct code.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Tensor type id → name, values per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
BLOCK_SIZES = {name: block for name, block, _ in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata` maps keys to Python values (arrays are lists); `tensors` are in file order, shapes row-major.

    Of a split model, `path` and `metadata` are the first part's, and `tensors` those of all parts, in order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of `path`, and of the other parts if it is one part of a split model.

    Raises ModelError for anything but a whole little-endian GGUF of version 2 or 3.
    """
    header = _read_file(path)
    count = header.metadata.get(SPLIT_COUNT, 1)
    return _join(path, count) if isinstance(count, int) and count > 1 else header


def _join(path: Path, count: int) -> GGUFHeader:
    """The headers of all parts as one. Raises ModelError naming the part or the tensors that are missing."""
    names = part_names(path.name)
    if len(names) != count:
        raise ModelError(
            f"{path}: it is one of {count} parts of a split model, and its name does not say which; name the parts as "
            f"they were written: {path.stem}-00001-of-{count:05d}.gguf and so on."
        )
    parts: list[GGUFHeader] = []
    for position, name in enumerate(names):
        part = path.with_name(name)
        if not part.is_file():
            raise ModelError(
                f"{part}: this part of a split model of {count} parts is missing; put it beside the others."
            )
        parts.append(_read_file(part))
        told = (parts[-1].metadata.get(SPLIT_NUMBER), parts[-1].metadata.get(SPLIT_COUNT))
        if told != (position, count):
            raise ModelError(
                f"{part}: it says that it is part {told[0]} (from 0) of {told[1]}, not {position} of {count}."
            )
    tensors: dict[str, TensorEntry] = {}
    for header in parts:
        again = tensors.keys() & header.tensors.keys()
        if again:
            raise ModelError(f"{header.path}: tensor {min(again)} is in an earlier part, too.")
        tensors |= header.tensors
    promised = parts[0].metadata.get(SPLIT_TENSORS, len(tensors))
    if promised != len(tensors):
        raise ModelError(f"{path}: the parts hold {len(tensors)} tensors, and the first one promises {promised}.")
    return GGUFHeader(parts[0].path, parts[0].metadata, tensors)


def _read_file(path: Path) -> GGUFHeader:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            cursor = _Cursor(path, size, file.read)
            return _read(path, size, cursor)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}.") from error


class _Cursor:
    """Sequential reads of the header out of a buffer that grows as the header turns out to be longer."""

    def __init__(self, path: Path, size: int, read: Callable[[int], bytes]) -> None:
        self._path = path
        self._size = size
        self._read = read
        self._buffer = b""
        self._start = 0  # file offset of the buffer's first byte
        self._position = 0

    @property
    def offset(self) -> int:
        return self._start + self._position

    def _need(self, count: int) -> None:
        missing = self._position + count - len(self._buffer)
        if missing <= 0:
            return
        if self.offset + count > self._size:
            raise ModelError(
                f"{self._path}: the header needs {count} bytes at offset {self.offset}, but the file ends "
                f"after {self._size} bytes; it is truncated or not a GGUF file."
            )
        rest = self._buffer[self._position :]
        self._start += self._position
        self._buffer = rest + self._read(max(missing, READ_BYTES))
        self._position = 0

    def bytes(self, count: int) -> bytes:
        self._need(count)
        taken = self._buffer[self._position : self._position + count]
        self._position += count
        return taken

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(self.bytes(layout.size))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        # Some vocabularies hold tokens that are no valid UTF-8 of their own; surrogates keep their bytes.
        return self.bytes(self.number("Q")).decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """Vocabularies hold half a million strings: this loop calls nothing that it can avoid."""
        unpack = struct.Struct("<Q").unpack_from
        found: list[str] = []
        buffer, at = self._buffer, self._position
        for _ in range(count):
            end = at + 8
            if end <= len(buffer):
                start, end = end, end + unpack(buffer, at)[0]
            if end > len(buffer):
                self._position = at
                found.append(self.string())
                buffer, at = self._buffer, self._position
            else:
                found.append(buffer[start:end].decode("utf-8", "surrogateescape"))
                at = end
        self._position = at
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING_TYPE:
            return self.string()
        if kind == ARRAY_TYPE:
            element, count = self.number("I"), self.number("Q")
            if element in SCALARS:
                return list(self.numbers(SCALARS[element], count))
            if element == STRING_TYPE:
                return self.strings(count)
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise ModelError(f"{self._path}: metadata value of unknown type {kind} at offset {self.offset}.")
        return self.number(SCALARS[kind])


def _read(path: Path, size: int, cursor: _Cursor) -> GGUFHeader:
    magic = cursor.bytes(min(4, size))
    if magic != MAGIC:
        raise ModelError(f"{path}: not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
    version = cursor.number("I")
    if version not in VERSIONS:
        order = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path}: GGUF version {version}{order} is not supported; supported are 2 and 3.")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {info.name: _entry(path, size, data_start, info) for info in infos}
    return GGUFHeader(path, metadata, tensors)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor's line in the header: row-major shape, type id, offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    # The file lists the fastest dimension first.
    shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
    return _TensorInfo(name, shape, cursor.number("I"), cursor.number("Q"))


def _entry(path: Path, size: int, data_start: int, info: _TensorInfo) -> TensorEntry:
    name, shape = info.name, info.shape
    if info.kind not in TENSOR_TYPES:
        raise ModelError(f"{path}: tensor {name} has type {info.kind}, which is not known; known are "
                         f"{', '.join(kind for kind, *_ in TENSOR_TYPES.values())}.")  # fmt: skip
    encoding, block, block_bytes = TENSOR_TYPES[info.kind]
    if shape and shape[-1] % block:
        raise ModelError(f"{path}: tensor {name} has rows of {shape[-1]}, no multiple of {encoding}'s {block}.")
    offset = data_start + info.offset
    num_bytes = prod(shape) // block * block_bytes
    if offset + num_bytes > size:
        raise ModelError(
            f"{path}: tensor {name} ends at byte {offset + num_bytes}, but the file has {size} bytes; it is truncated."
        )
    return TensorEntry(name, shape, path, offset, num_bytes, encoding)
