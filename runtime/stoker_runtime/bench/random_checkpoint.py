"""Writes a checkpoint of a known shape with random weights, for measuring a start with real files.

Invariants: the folder has what a model's has: config.json, model.safetensors with the published tensor names, and a
tokenizer.json (one token a byte). Weights repeat a block of random numbers, so that writing runs at the disk's speed.
In AWQ's layout linears are codes, zero points of 8 and scales of groups of 128; norms, embedding and head stay bf16.
Knows nothing of what is measured. Format of safetensors: an 8-byte length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import SHAPE_PREFIX, read_source
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, tensor_names

BLOCK_VALUES = 1 << 24
SCALE = 0.02
BFLOAT16_ONE = 0x3F80  # the gain of a norm
FORMATS = ("bf16", "awq")
GROUP = 128
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
EIGHTS = 0x88888888  # eight codes or zero points, each in the middle


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of a checkpoint: its published name, its dtype as safetensors spells it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        """How many."""
        return int(np.prod(self.shape))


def write_checkpoint(shape: str, folder: Path, layout: str = "bf16") -> int:
    """Write a checkpoint of `shape` into `folder`, in one of FORMATS; returns its bytes.

    Raises ModelError for an unknown shape, ValueError for one whose linears have no whole groups or words of AWQ.
    """
    source = read_source(SHAPE_PREFIX + shape)
    spec, config = build_spec(source), dict[str, Any](source.config)
    wanted = [each for part in tensors(spec) for each in stored(*part, layout)]
    if layout == "awq":
        config["quantization_config"] = AWQ
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return _write_safetensors(wanted, folder / "model.safetensors")


def tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], Role]]:
    """(published name, shape, role) of every tensor of a checkpoint in bf16, in the order the loader reads them."""
    for parameter in spec.parameters():
        names = tensor_names(spec, parameter.name, Vocabulary.HF)
        for name, rows in zip(names, piece_rows(spec, parameter, len(names)), strict=True):
            yield name, (rows, *parameter.shape[1:]), parameter.role


def stored(name: str, shape: tuple[int, ...], role: Role, layout: str) -> Iterator[Tensor]:
    """What a tensor is in the file."""
    if layout == "bf16" or role is not Role.LINEAR:
        yield Tensor(name, "BF16", shape)
        return
    (rows, columns), stem = shape, name.removesuffix(".weight")
    if rows % 8 or columns % GROUP:
        raise ValueError(f"{name} is {rows} × {columns}: AWQ packs 8 rows and scales {GROUP} columns")
    yield Tensor(f"{stem}.qweight", "I32", (columns, rows // 8))
    yield Tensor(f"{stem}.qzeros", "I32", (columns // GROUP, rows // 8))
    yield Tensor(f"{stem}.scales", "F16", (columns // GROUP, rows))


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


def _write_safetensors(wanted: list[Tensor], path: Path) -> int:
    header: dict[str, object] = {}
    at = 0
    for each in wanted:
        size = each.values * (4 if each.dtype == "I32" else 2)
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(BLOCK_VALUES, dtype=np.float32) * np.float32(SCALE)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16)
    ones = np.full(1 << 16, BFLOAT16_ONE, dtype=np.uint16)
    codes = generator.integers(1 << 32, size=BLOCK_VALUES, dtype=np.uint32)
    middle = np.full(1 << 16, EIGHTS, dtype=np.uint32)
    steps = np.full(1 << 16, SCALE / 5, dtype=np.float16)  # codes spread by 4.6 steps
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in wanted:
            if each.dtype == "I32":
                _write_values(file, each.values, middle if each.name.endswith("qzeros") else codes)
            elif each.dtype == "F16":
                _write_values(file, each.values, steps)
            else:
                _write_values(file, each.values, block if len(each.shape) > 1 or each.name.endswith("bias") else ones)
        return file.tell()


def _write_values(file: BinaryIO, count: int, values: npt.NDArray[Any]) -> None:
    for at in range(0, count, values.size):
        file.write(values[: count - at].data)
