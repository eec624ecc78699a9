"""Which checkpoint tensor goes where: every piece of every final tensor, checked against what the checkpoint holds.

Invariants: torch-free and pure. A route list covers each parameter of the spec completely and each checkpoint
tensor exactly once, tensors known to be harmless apart; otherwise a ModelError names the tensor.
Knows nothing of bytes and devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ARCHITECTURES, Names
from stoker_runtime.models.spec import ModelSpec, Parameter


class Vocabulary(StrEnum):
    """Whose tensor names a checkpoint uses, and the prefix of a layer's."""

    HF = "model.layers."
    GGUF = "blk."


# Buffers that old checkpoints carry along; they follow from the configuration.
HARMLESS = {
    Vocabulary.HF: re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    Vocabulary.GGUF: re.compile(r"rope_freqs\.weight"),
}


@dataclass(frozen=True, slots=True)
class Route:
    """Checkpoint tensor `entry` becomes rows `[row, row + shape[0])` of final tensor `parameter`.

    `head_rows` > 0: within every group of that many rows, the halves of rotated pairs are interleaved in the
    checkpoint and must be pulled apart.
    """

    entry: TensorEntry
    parameter: str
    row: int
    shape: tuple[int, ...]
    head_rows: int = 0


def route(spec: ModelSpec, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary) -> dict[str, tuple[Route, ...]]:
    """The routes into each parameter but those in integers, in the order of `spec.parameters()`.

    Raises ModelError for a tensor that is missing, of another shape than the spec's, or unknown.
    """
    plain = (parameter for parameter in spec.parameters() if parameter.scheme is None)
    routes = {parameter.name: _pieces(spec, parameter, entries, vocabulary) for parameter in plain}
    used = {piece.entry.name for pieces in routes.values() for piece in pieces}
    for name in entries:
        if name not in used and not _is_harmless(spec, name, vocabulary):
            raise ModelError(f"{entries[name].file}: tensor {name} has no place in a {spec.architecture}.")
    return routes


def _pieces(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary
) -> tuple[Route, ...]:
    field = parameter.name.rpartition(".")[2]
    head_rows = _interleaved_rows(spec, field, vocabulary)
    pieces: list[Route] = []
    row = 0
    names = tensor_names(spec, parameter.name, vocabulary)
    for position, (name, rows) in enumerate(zip(names, piece_rows(spec, parameter, len(names)), strict=True)):
        shape = (rows, *parameter.shape[1:])
        entry = find_entry(entries, name, shape, spec.architecture)
        # Values are never rotated: of Q, K and V the third keeps its rows.
        pieces.append(Route(entry, parameter.name, row, shape, head_rows if position < 2 else 0))
        row += rows
    return tuple(pieces)


def tensor_names(spec: ModelSpec, parameter: str, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The checkpoint's names of a final tensor's pieces, in row order."""
    row = ARCHITECTURES[spec.architecture]
    if not parameter.startswith("layers."):
        return _spoken(row.top_names[parameter], vocabulary)
    _, layer, field = parameter.split(".")
    return tuple(f"{vocabulary.value}{layer}.{name}" for name in _spoken(row.layer_names[field], vocabulary))


def _spoken(names: Names, vocabulary: Vocabulary) -> tuple[str, ...]:
    return names.hf if vocabulary is Vocabulary.HF else names.gguf


def piece_rows(spec: ModelSpec, parameter: Parameter, pieces: int) -> tuple[int, ...]:
    """The rows of each of a final tensor's `pieces` in a checkpoint."""
    if pieces == 1:
        return (parameter.shape[0],)
    if pieces == 3:
        return (spec.q_size, spec.kv_size, spec.kv_size)
    return (spec.ffn, spec.ffn)


def _interleaved_rows(spec: ModelSpec, field: str, vocabulary: Vocabulary) -> int:
    interleaved = ARCHITECTURES[spec.architecture].gguf_interleaved and vocabulary is Vocabulary.GGUF
    return spec.head_dim if interleaved and field in ("qkv", "qkv_bias") else 0


def _is_harmless(spec: ModelSpec, name: str, vocabulary: Vocabulary) -> bool:
    # A tied checkpoint may still carry its copy of the embedding as output head.
    if spec.tie_embeddings and name in tensor_names(spec, "head", vocabulary):
        return True
    return HARMLESS[vocabulary].fullmatch(name) is not None
