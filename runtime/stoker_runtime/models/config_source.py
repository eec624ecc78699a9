"""Finds out what a model argument names and reads its configuration: a folder, a .gguf file, or a shape.

Invariants: `config` speaks config.json's vocabulary whatever the source; reading it touches no weights and needs
no torch. Every fault is a ModelError that names the file and the key.
Knows nothing of which architectures exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.errors import ModelError
from stoker_runtime.models.gguf import config_from_gguf
from stoker_runtime.models.shapes import SHAPES, first_layers

SHAPE_PREFIX = "shape:"
# Where ModelOpt says how a checkpoint is quantized, unless config.json does.
MODELOPT_FILE = "hf_quant_config.json"


class SourceKind(StrEnum):
    """Where weights come from."""

    FOLDER = "folder"
    GGUF = "gguf"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model argument names. `path` is the folder or the file, None for a shape.

    `config` is config.json's content (or the same made from GGUF metadata), ModelOpt's settings beside it included;
    `generation` is generation_config.json's.
    """

    name: str
    kind: SourceKind
    path: Path | None
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)


def read_source(model: str) -> ModelSource:
    """Read the configuration of `model`. Raises ModelError if there is none or it cannot be read."""
    if model.startswith(SHAPE_PREFIX):
        return ModelSource(model, SourceKind.SHAPE, None, shape_config(model))
    path = Path(model)
    if path.is_dir():
        return _read_folder(model, path)
    if path.is_file():
        header = read_gguf_header(path)
        return ModelSource(model, SourceKind.GGUF, path, config_from_gguf(header))
    raise ModelError(f"{model}: no such folder or .gguf file.", param="model")


def shape_config(model: str) -> Mapping[str, Any]:
    """The configuration of `shape:NAME`, or of `shape:FOLDER` and the config.json in it; with `@N` behind either that
    of its first N layers alone. Raises ModelError.
    """
    name = model.removeprefix(SHAPE_PREFIX)
    whole, _, layers = name.rpartition("@")
    if whole and layers.isdecimal():
        config = shape_config(f"{SHAPE_PREFIX}{whole}")
        try:
            return first_layers(config, int(layers))
        except ValueError as error:
            raise ModelError(f"{model}: {error}.", param="model") from error
    if name in SHAPES:
        return SHAPES[name]
    if name and Path(name).is_dir():
        return _read_folder(model, Path(name)).config
    raise ModelError(
        f"{model}: unknown shape; the shapes are {', '.join(SHAPES)}, and any folder with a config.json.", param="model"
    )


def _read_folder(model: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" It holds {', '.join(ggufs)}: name the file to serve." if ggufs else ""
        raise ModelError(f"{folder}: there is no config.json in this folder.{hint}", param="model")
    config = read_json(folder / "config.json")
    modelopt = folder / MODELOPT_FILE
    if "quantization_config" not in config and modelopt.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **read_json(modelopt)}
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return ModelSource(model, SourceKind.FOLDER, folder, config, generation)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: the top level is {type(content).__name__}, not an object.")
    return content
