"""Writes a checkpoint of a known shape with random weights.

Invariants: the folder has what a model's has: config.json, model.safetensors with the published tensor names, and a
tokenizer.json (one token a byte); of a GGUF mix it is one model.gguf. Weights repeat a block of random numbers, so that
writing runs at the disk's speed.
Format of safetensors: an 8-byte length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from stoker_runtime.bench.checkpoints.gguf_file import MIXES, write_gguf
from stoker_runtime.bench.checkpoints.layouts import BFLOAT16_ONE, LAYOUTS, SCALE, Tensor
from stoker_runtime.bench.checkpoints.tokens import byte_tokenizer
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import SHAPE_PREFIX, read_source
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, tensor_names

RANDOM_BYTES = 1 << 25
CONSTANT_BYTES = 1 << 18
FORMATS = ("bf16", *LAYOUTS, *MIXES)


def write_checkpoint(shape: str, folder: Path, layout: str = "bf16") -> int:
    """Write a checkpoint of `shape` into `folder`, in one of FORMATS; returns the bytes of its weights' file.

    Raises ModelError for an unknown shape, ValueError for one that the layout cannot hold.
    """
    source = read_source(SHAPE_PREFIX + shape)
    spec, config = build_spec(source), dict[str, Any](source.config)
    if layout in MIXES:
        return write_gguf(spec, config, folder, layout)
    wanted = [each for part in tensors(spec) for each in stored(*part, layout)]
    if layout in LAYOUTS:
        config["quantization_config"] = LAYOUTS[layout].config
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
    """What a tensor is in the file. Raises ValueError for a linear that the layout cannot hold."""
    if layout == "bf16" or role is not Role.LINEAR:
        yield Tensor(name, "BF16", shape, None if len(shape) > 1 or name.endswith("bias") else BFLOAT16_ONE)
        return
    (rows, columns), way = shape, LAYOUTS[layout]
    if rows % way.rows or columns % way.columns:
        raise ValueError(f"{name} is {rows} × {columns}: it packs {way.rows} rows and scales {way.columns} columns")
    yield from way.parts(name.removesuffix(".weight"), rows, columns)


def _write_safetensors(wanted: list[Tensor], path: Path) -> int:
    header: dict[str, object] = {}
    at = 0
    for each in wanted:
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [at, at + each.num_bytes]}
        at += each.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(RANDOM_BYTES // 2, dtype=np.float32) * np.float32(SCALE)
    numbers = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    codes = generator.integers(1 << 32, size=RANDOM_BYTES // 4, dtype=np.uint32).view(np.uint8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in wanted:
            if each.value is not None:
                one = np.atleast_1d(each.value).view(np.uint8)
                _write_repeated(file, each.num_bytes, np.tile(one, CONSTANT_BYTES // len(one)))
            else:
                _write_repeated(file, each.num_bytes, numbers if each.dtype == "BF16" else codes)
        return file.tell()


def _write_repeated(file: BinaryIO, count: int, block: npt.NDArray[np.uint8]) -> None:
    for at in range(0, count, block.size):
        file.write(block[: count - at].data)
