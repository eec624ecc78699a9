"""Writes a checkpoint of a known shape with random weights, for measuring a start with real files.

Invariants: the folder has what a model's has: config.json, model.safetensors with the published tensor names, and a
tokenizer.json (one token a byte). Weights repeat a block of random numbers, so that writing runs at the disk's speed.
Knows nothing of what is measured. Format of safetensors: an 8-byte length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import SHAPE_PREFIX, read_source
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, tensor_names

BLOCK_VALUES = 1 << 24
SCALE = 0.02
BFLOAT16_ONE = 0x3F80  # the gain of a norm


def write_checkpoint(shape: str, folder: Path) -> int:
    """Write a bf16 checkpoint of `shape` into `folder`; returns its bytes. Raises ModelError for an unknown shape."""
    source = read_source(SHAPE_PREFIX + shape)
    spec = build_spec(source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return _write_safetensors(list(tensors(spec)), folder / "model.safetensors")


def tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(published name, shape) of every tensor of a checkpoint, in the order the loader reads them."""
    for parameter in spec.parameters():
        names = tensor_names(spec, parameter.name, Vocabulary.HF)
        for name, rows in zip(names, piece_rows(spec, parameter, len(names)), strict=True):
            yield name, (rows, *parameter.shape[1:])


def byte_tokenizer() -> dict[str, object]:
    """A tokenizer.json whose tokens are the 256 bytes."""
    # GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def _write_safetensors(wanted: list[tuple[str, tuple[int, ...]]], path: Path) -> int:
    header: dict[str, object] = {}
    at = 0
    for name, shape in wanted:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = np.random.default_rng(0).standard_normal(BLOCK_VALUES, dtype=np.float32) * np.float32(SCALE)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16)
    ones = np.full(1 << 16, BFLOAT16_ONE, dtype=np.uint16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in wanted:
            _write_values(file, int(np.prod(shape)), block if len(shape) > 1 or name.endswith("bias") else ones)
        return file.tell()


def _write_values(file: BinaryIO, count: int, values: npt.NDArray[np.uint16]) -> None:
    for at in range(0, count, values.size):
        file.write(values[: count - at].data)
