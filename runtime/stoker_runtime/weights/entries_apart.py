"""Brings apart what files hold together: the experts of a layer, and of GGUF merged queries, keys and values.

Invariants: torch-free and pure; no byte is read. What comes out has the names that the table of architectures speaks
of, so that nothing after this knows how a file had it. What is already so stays as it is.
Knows nothing of parameters' places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.models.architectures.row import Architecture
from stoker_runtime.models.parameter import Parameter
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import GGUF_LAYERS, Vocabulary, piece_rows, rows_of, tensor_names

RESHAPED = ("shared_gate", "conv", "a_log", "skip", "state_norm")
"""Fields that files hold with a dimension of 1 more or less, or by groups."""
FUSED, HALVES = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")


def brought_apart(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of a GGUF file of the whole model `spec`, each by the name that the table has for it."""
    found = dict(entries)
    for parameter in spec.parameters():
        if not parameter.name.startswith("layers."):
            continue
        names = tensor_names(spec, parameter.name, Vocabulary.GGUF)
        if all(name in found for name in names) and parameter.name.rpartition(".")[2] not in RESHAPED:
            continue
        prefix, field = f"{GGUF_LAYERS}{parameter.name.split('.')[1]}", parameter.name.rpartition(".")[2]
        if field.startswith("experts_"):
            _split_experts(spec, prefix, names, found)
        elif field in ("qkv", "qkv_bias") and len(names) == 3:
            _split_merged(spec, parameter, f"{prefix}.attn_qkv.{names[0].rpartition('.')[2]}", names, found)
        if field in RESHAPED and len(names) == 1:
            entry = found.get(names[0])
            if entry is not None and prod(entry.shape) == parameter.elements:
                found[names[0]] = replace(entry, shape=parameter.shape)
    return found


def _split_experts(spec: ModelSpec, prefix: str, names: tuple[str, ...], found: dict[str, TensorEntry]) -> None:
    """Each expert's tensor of those for all `[E, rows, …]`; of one for gate and up first both, gate's rows first."""
    assert spec.moe is not None, "experts are of a mixture"
    experts = spec.moe.experts
    for fused in [name for name in found if name.startswith(f"{prefix}.{FUSED}.")]:
        entry = found.pop(fused)
        if len(entry.shape) < 2 or entry.shape[0] != experts or entry.shape[1] % 2:
            found[fused] = entry
            continue
        for half, each in enumerate(HALVES):
            for expert, both in _experts(entry):
                rows = both.shape[0] // 2
                name = fused.replace(f"{FUSED}.", f"{each}.{expert}.")
                found[name] = replace(rows_of(both, half * rows, (rows, *both.shape[1:])), name=name)
    for name in names:
        tensor, _, rest = name.removeprefix(f"{prefix}.").partition(".")
        stacked = f"{prefix}.{tensor}.{rest.partition('.')[2]}"
        whole = found.get(stacked)
        if whole is None or len(whole.shape) < 2 or whole.shape[0] != experts:
            continue
        del found[stacked]
        for expert, one in _experts(whole):
            each = f"{prefix}.{tensor}.{expert}.{rest.partition('.')[2]}"
            found[each] = replace(one, name=each)


def _experts(entry: TensorEntry) -> Iterator[tuple[int, TensorEntry]]:
    """The part of a tensor `[E, …]` that is each expert's."""
    shape = entry.shape[1:]
    for expert in range(entry.shape[0]):
        yield expert, replace(rows_of(entry, expert, (1, *shape)), shape=shape)


def _split_merged(
    spec: ModelSpec, parameter: Parameter, merged: str, names: tuple[str, ...], found: dict[str, TensorEntry]
) -> None:
    """Queries, keys and values of a tensor that holds their rows behind each other."""
    sizes = piece_rows(spec, parameter, len(names))
    entry = found.get(merged)
    if entry is None or entry.shape != parameter.shape or sum(sizes) != entry.shape[0]:
        return
    del found[merged]
    first = 0
    for name, rows in zip(names, sizes, strict=True):
        found[name] = replace(rows_of(entry, first, (rows, *entry.shape[1:])), name=name)
        first += rows


def experts_apart(row: Architecture, layers: int, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """`entries` with a tensor `[rows, columns]` for each piece of each expert in the place of one `[E, rows, columns]`
    for all, whose name the row has as the field's `_stacked`; gate's rows stand before up's. What does not divide so
    stays, to be named as unknown.
    """
    found = dict(entries)
    for field in ("experts_gate_up", "experts_down"):
        if (stacked := row.layer_names.get(f"{field}_stacked")) is None:
            continue
        pieces = row.layer_names[field].hf
        for prefix in (f"{row.layers}{layer}." for layer in range(layers)):
            whole = found.get(f"{prefix}{stacked.hf[0]}")
            if whole is None or len(whole.shape) != 3 or whole.shape[1] % len(pieces):
                continue
            del found[whole.name]
            _, rows, columns = whole.shape
            rows //= len(pieces)
            matrices = replace(whole, shape=(whole.shape[0] * len(pieces), rows, columns))
            for at in range(matrices.shape[0]):
                expert, piece = divmod(at, len(pieces))
                name = f"{prefix}{pieces[piece].format(expert=expert)}"
                found[name] = replace(rows_of(matrices, at, (1, rows, columns)), name=name, shape=(rows, columns))
    return found
