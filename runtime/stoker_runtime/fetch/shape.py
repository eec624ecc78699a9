"""The few numbers of a model that the operator's fit check needs, read from config.json or a GGUF header.

Invariants: reads kilobytes, never tensors; a model that does not say gives an empty result, and the fit
check then works from the bytes alone.
Knows nothing of architectures.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

# GGUF value types (the format's own numbering): struct codes of the scalars, then string and array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_KEYS = 100_000


def shape_of(path: Path) -> dict[str, int]:
    """{"layers", "kvHeads", "headDim", "maxContext"} of a published folder or GGUF file; {} when it does not
    say.
    """
    try:
        if path.suffix == ".gguf":
            with open(path, "rb") as stream:
                return _complete(_of_gguf(_metadata(stream)))
        return _complete(_of_config(json.loads((path / "config.json").read_bytes())))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return {}


def _of_config(config: Mapping[str, Any]) -> dict[str, int]:
    config = config.get("text_config", config)
    heads = int(config["num_attention_heads"])
    return {
        "layers": int(config["num_hidden_layers"]),
        "kvHeads": int(config.get("num_key_value_heads") or heads),
        "headDim": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        "maxContext": int(config["max_position_embeddings"]),
    }


def _of_gguf(keys: Mapping[str, Any]) -> dict[str, int]:
    prefix = keys["general.architecture"]
    heads = int(keys[f"{prefix}.attention.head_count"])
    return {
        "layers": int(keys[f"{prefix}.block_count"]),
        "kvHeads": int(keys.get(f"{prefix}.attention.head_count_kv", heads)),
        "headDim": int(keys.get(f"{prefix}.attention.key_length", int(keys[f"{prefix}.embedding_length"]) // heads)),
        "maxContext": int(keys[f"{prefix}.context_length"]),
    }


def _complete(shape: dict[str, int]) -> dict[str, int]:
    return shape if all(value > 0 for value in shape.values()) else {}


def _metadata(stream: BinaryIO) -> dict[str, Any]:
    """A GGUF file's scalar and string values; arrays are passed over."""
    magic, version, _, count = struct.unpack("<4sIQQ", stream.read(24))
    if magic != b"GGUF" or version < 2 or count > _MAX_KEYS:
        raise ValueError("not a GGUF header")
    keys: dict[str, Any] = {}
    for _ in range(count):
        name = _string(stream)
        (kind,) = struct.unpack("<I", stream.read(4))
        if kind == _ARRAY:
            _pass_array(stream)
        else:
            keys[name] = _string(stream) if kind == _STRING else _scalar(stream, kind)
    return keys


def _pass_array(stream: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", stream.read(12))
    if kind == _STRING:
        for _ in range(count):
            (length,) = struct.unpack("<Q", stream.read(8))
            stream.seek(length, 1)
    else:
        stream.seek(struct.calcsize("<" + _SCALARS[kind]) * count, 1)


def _scalar(stream: BinaryIO, kind: int) -> int | float | bool:
    code = "<" + _SCALARS[kind]
    value: int | float | bool = struct.unpack(code, stream.read(struct.calcsize(code)))[0]
    return value


def _string(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > 1 << 24:
        raise ValueError("a string of impossible length")
    return stream.read(length).decode("utf-8", "replace")
