"""Finds the tensors of a folder of safetensors files, single or sharded.

Invariants: only headers are read; each returned entry was checked to lie within its file, so a truncated download
is an error before anything is allocated. A tensor that stands in two files is an error too.
Format: https://github.com/huggingface/safetensors, an 8-byte little-endian header length, JSON, data.
Knows nothing of what tensors are for.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The format's own dtype names → bytes per value.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_checkpoint_index(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`. Raises ModelError naming file, tensor and byte counts."""
    entries: dict[str, TensorEntry] = {}
    for file in checkpoint_files(folder):
        for name, entry in read_header(file).items():
            if name in entries:
                raise ModelError(f"{file}: tensor {name} is also in {entries[name].file.name}.")
            entries[name] = entry
    return entries


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those of the index, else model.safetensors, else all there are."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_read_index(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{index}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}.")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        hint = f" It holds {', '.join(others)}, which are pickles: convert them." if others else ""
        raise ModelError(f"{folder}: there are no .safetensors files in this folder.{hint}")
    return files


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: cannot be read as an index with a weight_map: {error!r}.") from error
    outside = [name for name in weight_map.values() if Path(name).name != name]
    if outside:
        raise ModelError(f"{index}: {outside[0]!r} is not a file name within the folder.")
    return dict(weight_map)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if len(head) < 8 or 8 + length > size:
                raise ModelError(
                    f"{file}: the header ends at byte {8 + length}, but the file has {size} bytes; it is "
                    "truncated or not a safetensors file."
                )
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: the safetensors header cannot be read: {error}.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: the safetensors header is not an object.")
    header.pop("__metadata__", None)
    return {name: _entry(file, size, 8 + length, name, info) for name, info in header.items()}


def _entry(file: Path, size: int, data_start: int, name: str, info: Any) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{file}: tensor {name} has a broken header entry: {error!r}.") from error
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}.")
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ModelError(
            f"{file}: tensor {name}, {dtype} {list(shape)}, needs {expected} bytes; its header gives {end - begin}."
        )
    if data_start + end > size:
        raise ModelError(
            f"{file}: tensor {name} ends at byte {data_start + end}, but the file has {size} bytes; it is truncated."
        )
    return TensorEntry(name, shape, file, data_start + begin, end - begin, dtype)
