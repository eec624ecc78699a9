"""Read the key-values of a GGUF file and nothing else: no tensor is touched and no array library is imported.

Invariants: the file is mapped, never read whole; every length is checked against the file's size before it is
used, so a truncated or hostile file is a ModelError that names the file and the byte. Numeric arrays come back
as `array.array`, string arrays as `list[str]`.
Knows nothing of tensors, tokenizers or architectures. Format: GGUF versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from stoker_runtime.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_KEY_BYTES = 65_535

MetadataValue: TypeAlias = "int | float | bool | str | list[str] | array[int] | array[float]"


class _Cursor:
    """A bounds-checked position in the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what} at byte {self.at}; the GGUF file is truncated or corrupt.")

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > self.size:
            raise self.fail(f"{length} bytes are promised but only {self.size - self.at} are left")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, code: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def integer(self, code: str) -> int:
        return int(self.number(code))

    def string(self, limit: int | None = None) -> str:
        length = self.integer("Q")
        if limit is not None and length > limit:
            raise self.fail(f"a key of {length} bytes")
        return self.take(length).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        # Vocabularies hold hundreds of thousands of strings: this loop stays free of calls that it can avoid.
        unpack, data, at, size = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        if count * 8 > size - at:
            raise self.fail(f"an array of {count} strings")
        found: list[str] = []
        append = found.append
        for _ in range(count):
            if at + 8 > size:
                self.at = at
                raise self.fail("a string's length is missing")
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                self.at = start
                raise self.fail("a string runs past the end of the file")
            append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return found

    def numbers(self, kind: int, count: int) -> array[int] | array[float] | list[str]:
        if kind not in SCALARS:
            raise self.fail(f"an array of unknown type {kind}")
        code = "B" if SCALARS[kind] == "?" else SCALARS[kind]
        values: array[int] | array[float] = array(code)
        if count * values.itemsize > self.size - self.at:
            raise self.fail(f"an array of {count} numbers")
        values.frombytes(self.take(count * values.itemsize))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def value(self) -> MetadataValue:
        kind = self.integer("I")
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise self.fail(f"a value of unknown type {kind}")
            return self.number(SCALARS[kind])
        element, count = self.integer("I"), self.integer("Q")
        return self.strings(count) if element == STRING else self.numbers(element, count)


def read_metadata(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, MetadataValue]:
    """Return the key-values of the GGUF file at `path` whose key is `wanted`.

    Raises ModelError when the file is missing, is no GGUF of a known version, or is truncated.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelError(f"{path}: too short to be a GGUF file ({path.stat().st_size} bytes).")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(path, data), wanted)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error


def _read(cursor: _Cursor, wanted: Callable[[str], bool]) -> dict[str, MetadataValue]:
    magic = cursor.take(4)
    if magic != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
    version = cursor.integer("I")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ModelError(f"{cursor.path}: GGUF version {version} is not supported; versions {known} are.")
    cursor.integer("Q")
    count = cursor.integer("Q")
    found: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = cursor.string(limit=MAX_KEY_BYTES)
        value = cursor.value()
        if wanted(key):
            found[key] = value
    return found
